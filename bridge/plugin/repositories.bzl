"""Where the plugin's headers come from, and what stands in for the rules that Bazel would fetch."""

_HEADERS = """
cc_library(
    name = "headers",
    hdrs = glob(["pjrt_c_api.h", "xla/**/*.h"]),
    includes = ["."],
    visibility = ["//visibility:public"],
)
"""
_INCLUDE = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('jaxlib').origin).parent / 'include')"

def _python(context, *arguments):
    python = context.which("python3")
    done = context.execute([python] + list(arguments))
    if done.return_code:
        fail("%s: activate the environment of requirements.txt first\n%s" % (python, done.stderr))
    return done.stdout

def _plugin_headers(context):
    generator = context.path(Label("//:bridge/plugin/generate_pjrt_header.py"))
    context.file("pjrt_c_api.h", _python(context, generator))
    context.symlink(_python(context, "-c", _INCLUDE).strip() + "/xla", "xla")
    context.file("BUILD.bazel", _HEADERS)

# The C API's structures from pypjrt and the headers of XLA's FFI from jaxlib, of the python3 on PATH.
plugin_headers = repository_rule(implementation = _plugin_headers, environ = ["PATH"])

def _built_in_rules(context):
    context.file(context.attr.folder + "/BUILD.bazel", "")
    lines = ["%s = native.%s\n" % (rule, rule) for rule in context.attr.rules]
    context.file(context.attr.folder + "/defs.bzl", "".join(lines))

# Bazel's own tools load their rules from repositories that it would fetch; here those hold the built-in rules.
built_in_rules = repository_rule(
    implementation = _built_in_rules,
    attrs = {"folder": attr.string(), "rules": attr.string_list()},
)

def _empty_targets(context):
    lines = ["filegroup(name = %r, visibility = [\"//visibility:public\"])\n" % target for target in context.attr.targets]
    context.file("BUILD.bazel", "".join(lines))

# Tools that Bazel names for every test and would fetch, but uses only to measure coverage.
empty_targets = repository_rule(implementation = _empty_targets, attrs = {"targets": attr.string_list()})
