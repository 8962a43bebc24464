"""What handlers import from `ts.torch_handler.base_handler`."""

from flambeau.handlers.base import BaseHandler as BaseHandler
