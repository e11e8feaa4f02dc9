"""TT_TPU_PLUGIN_CONFIG: what bridge.backend tells the plugin, the service and its workers. Standard library only."""


def parse_config(text: str) -> dict[str, str]:
    """The key=value lines: backend, inner_library, fingerprint, stablehlo_version and more."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
