"""Cannot be loaded."""

import a_module_that_nobody_has  # noqa: F401


class Broken:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return data
