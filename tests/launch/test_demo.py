"""The demonstration prints what the model says, and says what went wrong."""

import sys

import pytest

from launch import demo, server

# A server that is healthy at once and answers /generate with one word.
ANSWERS = """
import http.server, json, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["text"] == "The capital of France is"
        self.answer(json.dumps({"text": " Paris."}).encode())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILS = "raise SystemExit('no such chip')"


@pytest.fixture
def run_demo(monkeypatch, tmp_path, smollm2):
    """run_demo(source, status): the demonstration with a stand-in for the server; returns its exit status."""
    monkeypatch.setattr(demo, "smollm2_checkpoint", lambda _folder, dtype: smollm2(dtype))

    def run(source: str, status: int = 0) -> int:
        command = lambda _model, address, _options: [sys.executable, "-c", source, str(address.port), str(status)]
        monkeypatch.setattr(server, "command", command)
        return demo.main([str(tmp_path)])

    return run


def test_it_prints_prompt_and_answer(run_demo, capsys):
    """The prompt and the model's continuation are all of its standard output, and the exit status is 0."""
    assert run_demo(ANSWERS) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_a_server_that_fails_is_shown(run_demo, capsys):
    """When the server does not start, the end of its log is in the message and the exit status is 1."""
    assert run_demo(FAILS) == 1
    assert "no such chip" in capsys.readouterr().err


def test_a_server_that_ends_badly_is_a_failure(run_demo, capsys):
    """When the server's own exit status is not 0, neither is the demonstration's."""
    assert run_demo(ANSWERS, status=3) == 1
    assert "status 3" in capsys.readouterr().err
