"""Define the version of fewbits, apart from the public API, so that modules of the packages can import it."""

__version__ = "0.2.0"
