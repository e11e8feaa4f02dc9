"""The server's own programs compile whole on the real libtt: SmolLM2's shapes, two layers, traced from SGLang's code."""

import json
import subprocess
import sys
from pathlib import Path

import transformers

SMOLLM2_TWO_LAYERS = transformers.LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def test_decode_and_prefill(libtt, mock_environment, tmp_path):
    """One decode program of four requests and one prefill program of 64 tokens, through torch_tpu and our plugin."""
    SMOLLM2_TWO_LAYERS.save_pretrained(tmp_path / "model")
    environment = mock_environment | {
        "LIBTT_TPU_COMPAT": "1",
        "SGLANG_PLATFORM": "tpu_oot",
        "TT_TPU_BACKEND": "libtt",
        "TT_TPU_INNER_PLUGIN": str(libtt),
        "TT_TPU_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    shapes, results = ("decode:4", "prefill:64"), tmp_path / "results.json"
    command = [sys.executable, Path(__file__).parent / "compile_server.py", tmp_path / "model", results, *shapes]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(results.read_text()) == dict.fromkeys(shapes, "")
