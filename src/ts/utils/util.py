"""What handlers import from `ts.utils.util`."""

from flambeau.errors import PredictionException as PredictionException
from flambeau.handlers.labels import load_label_mapping as load_label_mapping
from flambeau.handlers.labels import map_class_to_label as map_class_to_label
from flambeau.handlers.loaders.compile_backends import PT2Backend as PT2Backend
from flambeau.handlers.loaders.compile_backends import check_valid_pt2_backend as check_valid_pt2_backend
from flambeau.handlers.text_normalization import HTML
from flambeau.torchserve.handlers.functions import deprecated as deprecated
from flambeau.torchserve.handlers.functions import get_yaml_config as get_yaml_config
from flambeau.torchserve.handlers.functions import list_classes_from_module as list_classes_from_module

CLEANUP_REGEX = HTML
