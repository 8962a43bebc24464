"""The version of the server."""

from flambeau import __version__ as __version__
