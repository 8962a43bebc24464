"""Everything that exists for users of TorchServe: no other part of the package imports it.

It is reached by import strings, constructor arguments and events.
"""

TORCHSERVE_VERSION = "0.12.0"  # the version whose interface this is, for scripts and handlers that ask
WORKFLOW_ARCHIVER_VERSION = "0.2.15"  # that of its workflow archiver, which had a number of its own
