"""What handlers import from `ts.utils.util`."""

from flambeau.errors import PredictionException as PredictionException
from flambeau.handlers.labels import load_label_mapping as load_label_mapping
from flambeau.handlers.labels import map_class_to_label as map_class_to_label
