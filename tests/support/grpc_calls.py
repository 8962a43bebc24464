"""A gRPC client that knows nothing of our .proto files: its own are written from the names and numbers below."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import grpc

from support.running import free_ports

INFERENCE = """
syntax = "proto3";
package org.pytorch.serve.grpc.inference;
import "google/protobuf/empty.proto";
import "google/rpc/status.proto";
service InferenceAPIsService {
  rpc Ping(google.protobuf.Empty) returns (TorchServeHealthResponse) {}
  rpc Predictions(PredictionsRequest) returns (PredictionResponse) {}
  rpc StreamPredictions(PredictionsRequest) returns (stream PredictionResponse) {}
  rpc StreamPredictions2(stream PredictionsRequest) returns (stream PredictionResponse) {}
}
message PredictionsRequest {
  string model_name = 1; string model_version = 2; map<string, bytes> input = 3; optional string sequence_id = 4;
}
message PredictionResponse {
  bytes prediction = 1; optional string sequence_id = 2; optional google.rpc.Status status = 3;
}
message TorchServeHealthResponse { string health = 1; }
"""
MANAGEMENT = """
syntax = "proto3";
package org.pytorch.serve.grpc.management;
service ManagementAPIsService {
  rpc DescribeModel(DescribeModelRequest) returns (ManagementResponse) {}
  rpc ListModels(ListModelsRequest) returns (ManagementResponse) {}
  rpc RegisterModel(RegisterModelRequest) returns (ManagementResponse) {}
  rpc ScaleWorker(ScaleWorkerRequest) returns (ManagementResponse) {}
  rpc SetDefault(SetDefaultRequest) returns (ManagementResponse) {}
  rpc UnregisterModel(UnregisterModelRequest) returns (ManagementResponse) {}
}
message ManagementResponse { string msg = 1; }
message DescribeModelRequest { string model_name = 1; string model_version = 2; bool customized = 3; }
message ListModelsRequest { int32 limit = 1; int32 next_page_token = 2; }
message RegisterModelRequest {
  int32 batch_size = 1; string handler = 2; int32 initial_workers = 3; int32 max_batch_delay = 4;
  string model_name = 5; int32 response_timeout = 6; string runtime = 7; bool synchronous = 8; string url = 9;
  bool s3_sse_kms = 10; int32 startup_timeout = 11;
}
message ScaleWorkerRequest {
  string model_name = 1; string model_version = 2; int32 max_worker = 3; int32 min_worker = 4; int32 number_gpu = 5;
  bool synchronous = 6; int32 timeout = 7;
}
message SetDefaultRequest { string model_name = 1; string model_version = 2; }
message UnregisterModelRequest { string model_name = 1; string model_version = 2; }
"""
OPEN_INFERENCE = """
syntax = "proto3";
package org.pytorch.serve.grpc.openinference;
service GRPCInferenceService {
  rpc ServerLive(ServerLiveRequest) returns (ServerLiveResponse) {}
  rpc ServerReady(ServerReadyRequest) returns (ServerReadyResponse) {}
  rpc ModelReady(ModelReadyRequest) returns (ModelReadyResponse) {}
  rpc ServerMetadata(ServerMetadataRequest) returns (ServerMetadataResponse) {}
  rpc ModelMetadata(ModelMetadataRequest) returns (ModelMetadataResponse) {}
  rpc ModelInfer(ModelInferRequest) returns (ModelInferResponse) {}
}
message ServerLiveRequest {}
message ServerLiveResponse { bool live = 1; }
message ServerReadyRequest {}
message ServerReadyResponse { bool ready = 1; }
message ModelReadyRequest { string name = 1; string version = 2; }
message ModelReadyResponse { bool ready = 1; }
message ServerMetadataRequest {}
message ServerMetadataResponse { string name = 1; string version = 2; repeated string extensions = 3; }
message ModelMetadataRequest { string name = 1; string version = 2; }
message ModelMetadataResponse {
  message TensorMetadata { string name = 1; string datatype = 2; repeated int64 shape = 3; }
  string name = 1; repeated string versions = 2; string platform = 3;
  repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5;
}
message ModelInferRequest {
  message InferInputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3; map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  message InferRequestedOutputTensor { string name = 1; map<string, InferParameter> parameters = 2; }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferInputTensor inputs = 5; repeated InferRequestedOutputTensor outputs = 6;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  message InferOutputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3; map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6;
}
message InferParameter {
  oneof parameter_choice { bool bool_param = 1; int64 int64_param = 2; string string_param = 3; }
}
message InferTensorContents {
  repeated bool bool_contents = 1; repeated int32 int_contents = 2; repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6;
  repeated double fp64_contents = 7; repeated bytes bytes_contents = 8;
}
"""
FILES = {"inference": INFERENCE, "management": MANAGEMENT, "open_inference_grpc": OPEN_INFERENCE}


@cache
def stubs() -> SimpleNamespace:
    """The modules that grpcio-tools makes of these files."""
    import google.rpc

    folder = Path(mkdtemp(prefix="stubs-"))
    for name, text in FILES.items():
        (folder / f"{name}.proto").write_text(text)
    site = Path(google.rpc.__path__[0]).parents[1]
    words = [f"-I{folder}", f"-I{site}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *words, *(f"{name}.proto" for name in FILES)], check=True
    )
    sys.path.insert(0, str(folder))
    modules = {
        f"{name}{part}": importlib.import_module(f"{name}{part}") for name in FILES for part in ("_pb2", "_pb2_grpc")
    }
    return SimpleNamespace(**modules)


class Client:
    """Calls to one server; failures raise grpc.RpcError."""

    def __init__(self, port: int, management_port: int, channel: Any = grpc.insecure_channel) -> None:
        made = stubs()
        self.channel = channel(f"127.0.0.1:{port}")
        self._management_channel = channel(f"127.0.0.1:{management_port}")
        self.inference = made.inference_pb2_grpc.InferenceAPIsServiceStub(self.channel)
        self.open_inference = made.open_inference_grpc_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.management = made.management_pb2_grpc.ManagementAPIsServiceStub(self._management_channel)
        self.management_channel = self._management_channel

    def close(self) -> None:
        self.channel.close()
        self._management_channel.close()

    def predict(self, *arguments: Any, timeout: float = 60, metadata: Any = None, **fields: Any) -> Any:
        """What a model answers to an order."""
        reply = self.inference.Predictions(request(*arguments, **fields), timeout=timeout, metadata=metadata)
        return reply.prediction

    def stream(self, *arguments: Any, timeout: float = 60, **fields: Any) -> list[bytes]:
        """The messages a model answers with."""
        replies = self.inference.StreamPredictions(request(*arguments, **fields), timeout=timeout)
        return [reply.prediction for reply in replies]

    def manage(self, method: str, *, metadata: Any = None, timeout: float = 60, **fields: Any) -> str:
        """What a management call answers."""
        kind = {"ListModels": "ListModelsRequest", "ScaleWorker": "ScaleWorkerRequest"}.get(method, f"{method}Request")
        message = getattr(stubs().management_pb2, kind)(**fields)
        text: str = getattr(self.management, method)(message, timeout=timeout, metadata=metadata).msg
        return text


def request(model: str = "orders", order: Any = None, *, inputs: Any = None, **fields: Any) -> Any:
    """A PredictionsRequest with an order, or with these inputs."""
    given = {} if order is None else {"order": json.dumps(order).encode()}
    return stubs().inference_pb2.PredictionsRequest(model_name=model, input={**given, **(inputs or {})}, **fields)


def grpc_flags() -> list[str]:
    """Two free ports, as words of the command line."""
    port, management_port = free_ports(2)
    return ["--grpc-port", str(port), "--grpc-management-port", str(management_port)]


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """The status and details of a call that must fail."""
    try:
        answer = call(*arguments, **options)
        answer = [*answer] if hasattr(answer, "__next__") else answer
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]
    raise AssertionError(f"it was answered: {answer!r}")
