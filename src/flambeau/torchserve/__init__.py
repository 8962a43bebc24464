"""Everything that exists for users of TorchServe: no other part of the package imports it.

It is reached by import strings, constructor arguments and events.
"""

TORCHSERVE_VERSION = "0.12.0"  # the version whose interface this is, for scripts and handlers that ask
