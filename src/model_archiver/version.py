"""The version of the archiver, which is that of the server."""

from flambeau import __version__ as __version__
