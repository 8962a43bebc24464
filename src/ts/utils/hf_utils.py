"""What scripts import from `ts.utils.hf_utils`."""

from __future__ import annotations

from flambeau.torchserve.handlers.optional_imports import need

CHECKPOINT_FILES = ("*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*")


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Download a checkpoint from the Hugging Face hub and return where it lies."""
    hub = need("huggingface_hub", "pip install huggingface_hub")
    path: str = hub.snapshot_download(
        repo_id=model_id,
        revision=revision,
        allow_patterns=list(CHECKPOINT_FILES),
        cache_dir=model_path,
        # True: the token of `huggingface-cli login`, if there is one, so that open models need none.
        token=None if use_auth_token is True else use_auth_token,
    )
    return path
