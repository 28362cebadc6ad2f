"""Read the fields of a published configuration, with messages that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED = object()


@dataclass(frozen=True)
class Fields:
    """The fields of a published configuration by name, and the file that they come from (`origin`).

    Each method returns the value of one field. For a field that is absent or None it returns the default; without a
    default it raises ValueError. A value of the wrong type raises ValueError, too.
    """

    origin: str
    values: Mapping[str, Any]

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.origin} has no field {name}, which is required")
        return default

    def whole(self, name: str, default: Any = REQUIRED) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            raise ValueError(f"{self.origin}: {name} {value!r}: a whole number is expected")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise ValueError(f"{self.origin}: {name} {value!r}: a number is expected")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ValueError(f"{self.origin}: {name} {value!r}: true or false is expected")
        return value

    def expect(self, name: str, default: Any, *valid: Any, because: str = "fewbits supports no other value") -> Any:
        """Return the field's value; raise ValueError if it is not one of `valid`.

        because: why no other value is valid, for the error message; a clause such as "fewbits has no experts".
        """
        value = self.get(name, default)
        if value not in valid:
            choices = " or ".join(repr(choice) for choice in valid)
            raise ValueError(
                f"{self.origin}: a model with {name} {value!r} cannot be imported: {choices} is expected, because "
                f"{because}"
            )
        return value
