"""Check that a message contains certain values, whatever its wording is."""

import re


def naming(*values: object) -> str:
    """Return a regular expression for texts that contain each value as a whole word or phrase, in any order."""
    return "(?s)" + "".join(f"(?=.*{_whole(str(value))})" for value in values)


def names(text: str, *values: object) -> bool:
    """Tell whether the text contains each value as a whole word or phrase, in any order."""
    return re.search(naming(*values), text) is not None


def _whole(value: str) -> str:
    before, after = (r"(?<!\w)" if value[:1].isalnum() else "", r"(?!\w)" if value[-1:].isalnum() else "")
    return f"{before}{re.escape(value)}{after}"
