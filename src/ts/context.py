"""What handlers import from `ts.context`."""

from flambeau.worker.context import Context as Context
from flambeau.worker.context import RequestProcessor as RequestProcessor
