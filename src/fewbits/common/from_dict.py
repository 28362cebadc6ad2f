"""Build dataclasses from nested mappings, such as YAML and JSON, with errors that name the key and valid choices."""

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_dict(kind: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Return an instance of the dataclass `kind` with the values of `data`; raise ValueError for wrong keys and types.

    Fields that are dataclasses are built from nested mappings, and tuples from lists; other values need the field's
    type, but int is accepted for float. path: the dotted path of `data` in the whole mapping, for error messages.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{path or kind.__name__}: a mapping with the keys {', '.join(fields)} is expected, not {data!r}"
        )
    for key in data:
        if key not in fields:
            raise ValueError(f"unknown key {_join(path, str(key))}: valid keys are {', '.join(fields)}")
    required = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in data]:
        raise ValueError(f"{path or kind.__name__}: missing keys: {', '.join(missing)}")
    return kind(**{key: _value(hints[key], value, _join(path, key)) for key, value in data.items()})


def one_of(what: str, value: object, valid: Iterable[object]) -> None:
    """Raise ValueError if the value is not in `valid`. what: the name of the setting, with which the message begins."""
    valid = tuple(valid)
    if value not in valid:
        choices = f"valid values are {', '.join(map(str, valid))}" if valid else "no value is valid"
        raise ValueError(f"{what} {value!r}: {choices}")


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_dict(hint, value, path)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return _value(inner, value, path)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{path}: a list is expected, not {value!r}")
        return tuple(_value(args[0], item, path) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: a mapping is expected, not {value!r}")
        return {str(key): _value(args[1], item, _join(path, str(key))) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            digits = len(str(value))
            raise ValueError(f"{path}: a number up to 1.8e308 is expected, not one of {digits} digits") from None
    if hint in (str, int, float, bool) and (type(value) is not hint):
        raise ValueError(f"{path}: {hint.__name__} is expected, not {value!r}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
