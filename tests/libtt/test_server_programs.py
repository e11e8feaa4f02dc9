"""The server's own programs compile whole on the real libtt: SmolLM2's shapes, two layers, traced from SGLang's code."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import transformers

import mesh_descriptors
from bridge import ports
from bridge.compiler import module as modules
from bridge.compiler import pipeline
from bridge.compiler.placement import Placement

HERE = Path(__file__).parent
FOUR_CHIPS = HERE / "p150x4.yaml"
SMOLLM2_TWO_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def save_two_layers(folder: Path, **sizes: int) -> None:
    """A config.json; `sizes` change SmolLM2's."""
    transformers.LlamaConfig(**SMOLLM2_TWO_LAYERS | sizes).save_pretrained(folder)


def environment(folder: Path, given: Mapping[str, str], **variables: str) -> dict[str, str]:
    """Of a process that traces the server's programs, with its caches in `folder`; `variables` add to what is given."""
    common = {
        "LIBTT_TPU_COMPAT": "1",
        "SGLANG_PLATFORM": "tpu_oot",
        "TT_TPU_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    return {name: value for name, value in given.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"} | common | variables


def test_decode_and_prefill(libtt, mock_environment, tmp_path):
    """One decode program of four requests and one prefill program of 64 tokens, through torch_tpu and our plugin."""
    save_two_layers(tmp_path / "model")
    on_libtt = environment(tmp_path, mock_environment, TT_TPU_BACKEND="libtt", TT_TPU_INNER_PLUGIN=str(libtt))
    shapes, results = ("decode:4", "prefill:64"), tmp_path / "results.json"
    command = [sys.executable, HERE / "compile_server.py", tmp_path / "model", results, *shapes]
    done = subprocess.run(command, env=on_libtt, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(results.read_text()) == dict.fromkeys(shapes, "")


def stablehlo_of_rank_0(folder: Path, program: str) -> str:
    """A program of the first of four ranks, traced by all four on emulated chips."""
    save_two_layers(folder / "model", hidden_size=512, num_attention_heads=8, num_key_value_heads=4)
    mesh = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port())}
    ranks = []
    for rank in "0123":
        command = [sys.executable, HERE / "compile_server.py", folder / "model", folder / f"{rank}.json", program]
        emulated = environment(
            folder, os.environ, TT_TPU_BACKEND="emulated", OMP_NUM_THREADS="1", RANK=rank, LOCAL_RANK=rank, **mesh
        )
        with (folder / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=emulated, cwd=folder, stdout=log, stderr=log))
    try:
        codes = [process.wait(300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0, 0, 0], [(folder / f"{rank}.log").read_text()[-2000:] for rank in "0123"]
    return json.loads((folder / "0.json").read_text())[program]


def test_a_decode_step_of_four_chips(compile_on_libtt, tmp_path):
    """A rank's decode program with its collectives, as our passes hand it to libtt; 8 heads, for 9 are not divided by 4."""
    program = stablehlo_of_rank_0(tmp_path, "decode:4")
    assert "stablehlo.all_reduce" in program and "stablehlo.all_gather" in program
    context, four = modules.make_context(), Placement(1, 4, (0, 1, 2, 3))
    rewritten = pipeline.rewrite(context, program.encode(), "libtt", "1.10.0", four).program
    descriptor = tmp_path / "mesh.textproto"
    descriptor.write_text(mesh_descriptors.describe(mesh_descriptors.select("p150", 4)))
    answers = compile_on_libtt(
        {"decode": str(modules.parse(context, rewritten))},
        4,
        TT_METAL_MOCK_CLUSTER_DESC_PATH=str(FOUR_CHIPS),
        TT_MESH_GRAPH_DESC_PATH=str(descriptor),
    )
    assert answers == {"decode": ""}
