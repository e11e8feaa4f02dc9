"""SGLang's out-of-tree platform "tpu_oot": unmodified SGLang serves on `--device tpu`.

SGLang finds it through two entry points, `sglang.srt.platforms` (activate, here)
and `sglang.srt.plugins` (plugin.register). The scheduler's own tensors stay on
the host; only weights, KV pages and compiled programs live on the chip.
"""


def activate() -> str | None:
    """Name the platform class where the chip is presented as a TPU, else None."""
    from bridge.settings import load

    if not load().compat:
        return None
    return "bridge.sglang_platform.platform.TpuPlatform"
