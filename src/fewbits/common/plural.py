"""Write counts with their nouns."""


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, with an s unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
