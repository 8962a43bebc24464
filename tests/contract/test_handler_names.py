"""The names that handlers written for TorchServe import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from contextlib import suppress
from unittest import mock

import numpy
import pytest

from flambeau.worker.context import Context
from model_archiver import ModelArchiverConfig
from model_archiver.model_packaging import package_model
from model_archiver.model_packaging_utils import ModelExportUtils
from ts.model_service_worker import TorchModelServiceWorker
from workflow_archiver.workflow_packaging import generate_workflow_archive
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils

NAMES = {
    "ts": ["__version__"],
    "ts.context": ["Context", "RequestProcessor"],
    "ts.service": ["PREDICTION_METRIC", "PredictionException", "Service", "create_predict_response", "emit_metrics"],
    "ts.async_service": ["AsyncService"],
    "ts.model_loader": ["ModelLoader", "ModelLoaderFactory", "TsModelLoader"],
    "ts.model_service.model_service": ["ModelService", "SingleNodeService"],
    "ts.model_service_worker": ["ModelLoaderFactory", "TorchModelServiceWorker", "retrieve_msg"],
    "ts.protocol.otf_message_handler": [
        "create_load_model_response",
        "create_predict_response",
        "encode_response_headers",
        "retrieve_msg",
        "send_intermediate_predict_response",
    ],
    "ts.handler_utils.utils": ["create_predict_response", "import_class", "send_intermediate_predict_response"],
    "ts.handler_utils.timer": ["timed"],
    "ts.handler_utils.micro_batching": ["HANDLER_METHODS", "MicroBatching", "WorkerThread", "execute_call"],
    "ts.handler_utils.text_utils": ["get_tokenizer", "ngrams_iterator"],
    "ts.handler_utils.hf_batch_streamer": ["TextIteratorStreamerBatch"],
    "ts.handler_utils.distributed.pt_pippy": ["get_pipeline_driver", "initialize_rpc_workers"],
    "ts.handler_utils.distributed.deepspeed": ["create_checkpoints_json", "get_ds_engine"],
    "ts.handler_utils.preprocess.dali": ["get_dali_pipeline"],
    "ts.torch_handler.base_handler": [
        "BaseHandler",
        "IPEX_AVAILABLE",
        "ONNX_AVAILABLE",
        "PROFILER_AVAILABLE",
        "PT230_AVAILABLE",
        "PT2_AVAILABLE",
        "XLA_AVAILABLE",
        "setup_ort_session",
    ],
    "ts.torch_handler.vision_handler": ["VisionHandler"],
    "ts.torch_handler.image_classifier": ["ImageClassifier"],
    "ts.torch_handler.image_segmenter": ["ImageSegmenter"],
    "ts.torch_handler.object_detector": ["ObjectDetector"],
    "ts.torch_handler.text_handler": ["TextHandler"],
    "ts.torch_handler.text_classifier": ["TextClassifier"],
    "ts.torch_handler.contractions": ["CONTRACTION_MAP"],
    "ts.torch_handler.densenet_handler": ["DenseNetHandler"],
    "ts.torch_handler.dali_handler": ["DALIHandler"],
    "ts.torch_handler.dali_image_classifier": ["DALIImageClassifier"],
    "ts.torch_handler.gpt_handler": ["GptHandler"],
    "ts.torch_handler.vllm_handler": ["VLLMHandler"],
    "ts.torch_handler.trt_llm_handler": ["TRTLLMHandler"],
    "ts.torch_handler.distributed.base_pippy_handler": ["BasePippyHandler"],
    "ts.torch_handler.distributed.base_deepspeed_handler": ["BaseDeepSpeedHandler"],
    "ts.torch_handler.request_envelope.base": ["BaseEnvelope"],
    "ts.torch_handler.request_envelope.body": ["BodyEnvelope"],
    "ts.torch_handler.request_envelope.json": ["JSONEnvelope"],
    "ts.torch_handler.request_envelope.kserve": ["KServeEnvelope"],
    "ts.torch_handler.request_envelope.kservev2": ["KServev2Envelope"],
    "ts.torch_handler.unit_tests.test_utils.mock_context": ["MockContext"],
    "ts.torch_handler.unit_tests.test_utils.model_dir": ["copy_files", "download_model"],
    "ts.utils.util": [
        "CLEANUP_REGEX",
        "PT2Backend",
        "PredictionException",
        "check_valid_pt2_backend",
        "deprecated",
        "get_yaml_config",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ],
    "ts.utils.hf_utils": ["download_model"],
    "ts.utils.timeit_decorator": ["timeit"],
    "ts.llm_launcher": ["main"],
    "model_archiver": ["ModelArchiver", "ModelArchiverConfig", "__version__"],
    "model_archiver.model_packaging": ["generate_model_archive", "package_model"],
    "model_archiver.model_packaging_utils": ["ModelExportUtils", "archiving_options", "model_handlers"],
    "model_archiver.manifest_components.manifest": ["Manifest", "RuntimeType"],
    "model_archiver.model_archiver_error": ["ModelArchiverError"],
    "workflow_archiver": ["__version__"],
    "workflow_archiver.workflow_packaging": ["generate_workflow_archive", "package_workflow"],
    "workflow_archiver.workflow_packaging_utils": ["WorkflowExportUtils"],
    "workflow_archiver.workflow_archiver_error": ["WorkflowArchiverError"],
}
TORCHLESS = [
    *("ts.context", "ts.service", "ts.utils.util", "ts.handler_utils.utils", "ts.protocol.otf_message_handler"),
    *("ts.model_loader", "ts.handler_utils.hf_batch_streamer", "model_archiver", "workflow_archiver"),
]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name_is_where_handlers_look_for_it(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_names_that_need_no_torch_do_not_load_it():
    program = f"import sys; [__import__(name) for name in {TORCHLESS}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_libraries_that_are_missing_are_named_with_the_remedy(monkeypatch):
    from ts.handler_utils.distributed.deepspeed import get_ds_engine
    from ts.handler_utils.distributed.pt_pippy import get_pipeline_driver
    from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch

    for library in ("transformers", "deepspeed", "pippy"):
        monkeypatch.setitem(sys.modules, library, None)
    options = {
        "deepspeed": {},
        "handler": {"model_path": "weights"},
        "pippy": {"input_names": ["x"], "model_type": "other"},
    }
    context = Context("m", ".", None, 1, None, "1", model_yaml_config=options)
    with pytest.raises(ImportError, match="needs transformers, which is not installed: pip install transformers"):
        TextIteratorStreamerBatch(None, 2)
    with pytest.raises(ImportError, match="needs deepspeed, which is not installed: pip install deepspeed"):
        get_ds_engine(None, context)
    with pytest.raises(ImportError, match="needs pippy, which is not installed: pip install torchpippy"):
        get_pipeline_driver(None, 2, context)


@pytest.mark.parametrize(("module", "name"), [("vllm_handler", "VLLMHandler"), ("trt_llm_handler", "TRTLLMHandler")])
def test_handlers_of_other_engines_say_what_to_do_instead(module, name):
    handler = getattr(importlib.import_module(f"ts.torch_handler.{module}"), name)
    with pytest.raises(ValueError, match=f"{name} is not a handler of this server: use gpt_handler, .* own"):
        handler()


def test_texts_of_a_batch_are_streamed_together(monkeypatch):
    from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch

    class Streamer:  # what transformers' own does, without its tokenizer
        def __init__(self, tokenizer, skip_prompt, timeout, **options):
            self.texts, self.options = [], options

        def put(self, value):
            self.texts.append(str(value[0]))

        def end(self):
            pass

        def __next__(self):
            if not self.texts:
                raise StopIteration
            return self.texts.pop(0)

    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(TextIteratorStreamer=Streamer))
    streamer = TextIteratorStreamerBatch(None, 2, skip_special_tokens=True)
    for pair in ([1, 2], [3, 4]):
        streamer.put(numpy.array(pair))
    streamer.end()
    assert [*streamer] == [[{"text": "1"}, {"text": "2"}], [{"text": "3"}, {"text": "4"}]]
    assert streamer.streamers[0].options == {"skip_special_tokens": True}
    with pytest.raises(ValueError, match="batch size is set to 2 but got input tensor of shape"):
        streamer.put(numpy.array([1, 2, 3]))


def test_classes_are_found_by_their_dotted_names():
    from ts.handler_utils.utils import import_class

    assert import_class("collections.abc.Mapping") is import_class("abc.Mapping", "collections")
    assert import_class("OrderedDict", module_prefix="collections").__name__ == "OrderedDict"
    for name, message in (("", "class name"), ("Bare", "module name"), ("collections.Absent", "not found")):
        with pytest.raises(ImportError, match=message):
            import_class(name)


def test_a_mock_context_initializes_a_handler(tmp_path):
    import torch

    from ts.torch_handler.base_handler import BaseHandler
    from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext

    (tmp_path / "model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): return x.argmax(1)\n"
    )
    (tmp_path / "extra.yaml").write_text("a: 1\n")
    torch.save({}, tmp_path / "model.pt")  # a network without parameters
    context = MockContext(model_dir=str(tmp_path), model_yaml_config_file="extra.yaml")
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([[1.0, 2.0], [4.0, 3.0]], context) == [1, 0]
    assert context.model_yaml_config == {"a": 1}
    context.explain = True
    assert (context.get_request_header(0, "explain"), context.get_request_header(1, "explain")) == (False, True)


def test_checkpoints_are_listed_for_deepspeed(tmp_path):
    from ts.handler_utils.distributed.deepspeed import create_checkpoints_json

    (tmp_path / "b.bin").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    create_checkpoints_json(tmp_path, tmp_path / "list.json")
    listed = json.loads((tmp_path / "list.json").read_text())
    assert listed == {"type": "ds_model", "checkpoints": [str(tmp_path / "b.bin")], "version": 1.0}


@pytest.mark.parametrize(
    ("section", "message"),
    [(None, "has no dali config"), ({"batch_size": 1}, "lacks num_threads, device_id, seed, pipeline_file")],
)
def test_a_dali_section_must_be_complete(section, message):
    from ts.handler_utils.preprocess.dali import get_dali_pipeline

    with pytest.raises(ValueError, match=message):
        get_dali_pipeline(Context("m", ".", None, 1, None, "1", model_yaml_config={"dali": section}))


def test_timed_functions_print_how_long_they_took(capsys):
    from ts.utils.timeit_decorator import timeit

    assert timeit(lambda number: number + 1)(2) == 3
    assert "took a total of" in capsys.readouterr().out


def test_classes_of_a_module_are_those_it_defines():
    from ts.utils.util import list_classes_from_module

    module = types.ModuleType("made")
    exec("class A: pass\nclass B(A): pass\nfrom collections import OrderedDict", vars(module))
    assert list_classes_from_module(module) == [module.A, module.B]
    assert list_classes_from_module(module, module.B) == [module.B]


def test_deprecated_functions_warn_at_each_call():
    from ts.utils.util import deprecated

    @deprecated(version="1.0", replacement="newer")
    def old(number):
        return number

    for _ in range(2):
        with pytest.warns(PendingDeprecationWarning, match=r"old is deprecated in 1.0 and moved to newer"):
            assert old(3) == 3


def test_yaml_is_read_and_prediction_exceptions_tell_their_code(tmp_path):
    from ts.utils.util import CLEANUP_REGEX, PredictionException, get_yaml_config

    (tmp_path / "a.yaml").write_text("a: [1]\n")
    assert get_yaml_config(tmp_path / "a.yaml") == {"a": [1]}
    assert str(PredictionException("not here", 404)) == "not here : 404"
    assert CLEANUP_REGEX.sub("", "<b>a</b>&amp;") == "a"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ts.model_service_worker.retrieve_msg", lambda: TorchModelServiceWorker.handle_connection(mock.Mock(), None)),
        (
            "ts.model_service_worker.ModelLoaderFactory",
            lambda: TorchModelServiceWorker.load_model(mock.Mock(), {"modelName": "m", "modelPath": "p"}),
        ),
        (
            "model_archiver.model_packaging.ModelExportUtils",
            lambda: package_model(mock.Mock(export_path=".", force=False), ""),
        ),
        ("workflow_archiver.workflow_packaging.ArgParser", generate_workflow_archive),
    ],
)
def test_name_that_a_test_patches_is_the_one_that_the_code_uses(name, call):
    with mock.patch(name) as patched:
        patched.side_effect = patched.validate_inputs.side_effect = StopIteration
        patched.get_model_loader.side_effect = patched.workflow_archiver_args_parser.side_effect = StopIteration
        with suppress(StopIteration):
            call()
    assert patched.mock_calls
    module, _, attribute = name.rpartition(".")
    assert not isinstance(getattr(importlib.import_module(module), attribute), mock.Mock)


def test_versions_are_those_of_the_packages_they_replace():
    versions = [importlib.import_module(name).__version__ for name in ("ts", "model_archiver", "workflow_archiver")]
    assert versions == ["0.12.0", "0.12.0", "0.2.15"]
    assert versions == [
        importlib.import_module(f"{name}.version").__version__ for name in ("ts", "model_archiver", "workflow_archiver")
    ]


def test_manifest_is_real_while_a_test_patches_the_steps():
    config = ModelArchiverConfig("m", "handler.py", "1.0")
    flow = types.SimpleNamespace(workflow_name="w", spec_file="s.yaml", handler=None)
    with (
        mock.patch("model_archiver.model_packaging.ModelExportUtils"),
        mock.patch("workflow_archiver.workflow_packaging.WorkflowExportUtils"),
    ):
        model, workflow = (
            ModelExportUtils.generate_manifest_json(config),
            WorkflowExportUtils.generate_manifest_json(flow),
        )
    assert json.loads(model)["model"]["modelName"] == "m"
    assert json.loads(workflow)["workflow"]["workflowName"] == "w"
