"""The demo around the model: plan, prompts, servers, client and report."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from demo import DemoError, __main__, client, prompts, report, server, smollm2
from demo.__main__ import Plan
from demo.model_folder import Progress
from demo.models import MODELS
from demo.report import Held, Row
from demo.server import Server


def words(text: str) -> int:
    return len(text.split())


def row(
    label: str = "chat 1, turn 1",
    *,
    cached_tokens: int = 0,
    with_cache_s: float = 2.0,
    same_answer: bool = True,
) -> Row:
    return Row(label, 1314, cached_tokens, with_cache_s, 2.0, same_answer)


def child(tmp_path: Path, program: str) -> Server:
    """A server whose process runs a Python program instead."""
    made = Server(tmp_path, [], port=server.free_ports(1)[0], log=tmp_path / "log")
    made.command = [sys.executable, "-c", program]
    return made


class TestReport:
    def test_the_table_aligns_every_column(self) -> None:
        text = report.table([row(), row("chat 2", cached_tokens=1_000, with_cache_s=0.1)])
        assert text.splitlines() == [
            "                prompt  cached  first token   first token",
            "request         tokens  tokens  cache on, s  cache off, s  faster",
            "--------------  ------  ------  -----------  ------------  ------",
            "chat 1, turn 1   1,314       0        2.000         2.000    1.0x",
            "chat 2           1,314   1,000        0.100         2.000   20.0x",
        ]

    def test_answers_that_the_cache_changed_are_not_hidden(self) -> None:
        text = report.answers([row(), row(same_answer=False), row()])
        assert text == "answers that are the same with and without the cache: 2 of 3"

    def test_the_last_line_of_the_log_counts(self) -> None:
        line = "2026-01-02 03:04:05,678 - DEBUG - prefix cache holds {} bytes: {} blocks, {} tokens"
        log = "\n".join(["INFO", line.format(1, 2, 3), line.format(400, 5, 600), "noise"])
        assert report.held_bytes(log) == Held(nbytes=400, blocks=5, tokens=600)

    def test_a_log_without_the_line_gives_no_figure(self) -> None:
        stock = "2026-01-02 03:04:05,678 - INFO - Prompt Cache: 2 sequences, 0.02 GB"
        assert report.held_bytes(stock) is None
        text = report.memory(None, 100)
        assert "does not say" in text
        assert not any(character.isdigit() for character in text)

    def test_fp16_counts_keys_and_values_of_every_layer(self) -> None:
        config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
        assert report.fp16_bytes_per_token(config) == 30 * 3 * 64 * 2 * 2
        without = {
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "hidden_size": 576,
            "num_attention_heads": 9,
        }
        assert report.fp16_bytes_per_token(without) == report.fp16_bytes_per_token(config)

    def test_the_ratio_is_against_fp16_of_the_tokens_held(self) -> None:
        assert report.memory(Held(2_500, 3, 100), 100).splitlines() == [
            "bytes held by the prefix cache    2,500  (3 blocks, 100 tokens, everything counted)",
            "fp16 KV of the same tokens       10,000  (100 a token)",
            "ratio                             0.250",
        ]
        assert "ratio" not in report.memory(Held(0, 0, 0), 100)

    def test_windows_have_no_bytes_per_token_to_compare_with(self) -> None:
        config = {"num_hidden_layers": 18, "num_key_value_heads": 1, "sliding_window": 512}
        text = report.memory(Held(2_500, 3, 100), report.fp16_bytes_per_token(config))
        assert "2,500  (3 blocks, 100 tokens" in text
        assert "ratio" not in text


class TestPlan:
    def test_a_faster_machine_gets_a_longer_prompt_within_bounds(self) -> None:
        plan = Plan(turns=3, max_tokens=16, limit_s=170)
        shortest, longest = __main__.LENGTHS_TOKENS
        lengths = [__main__.prompt_length(speed, plan) for speed in (0.1, 5, 10, 20, 10_000)]
        assert lengths == sorted(lengths)
        assert (lengths[0], lengths[-1]) == (shortest, longest)

    def test_without_a_good_blas_a_hit_still_spans_blocks(self) -> None:
        """10 tokens/s, as two cores reach with the BLAS that mlx-cpu bundles: two whole blocks."""
        plan = Plan(turns=3, max_tokens=16, limit_s=__main__.REQUESTS_LIMIT_S)
        assert __main__.prompt_length(10, plan) > 300

    def test_the_estimate_stays_under_the_limit(self) -> None:
        """Prefill of all requests without a cache, of one with it, and all that is generated."""
        plan, speed = Plan(turns=4, max_tokens=16, limit_s=170), 12
        length = __main__.prompt_length(speed, plan)
        added = [turn * __main__.TURN_TOKENS for turn in range(1, plan.turns + 1)]
        tokens = length * (plan.requests + 1) + sum(added) + 2 * plan.requests * plan.max_tokens
        assert tokens / speed <= plan.limit_s


class TestPrompts:
    def test_the_system_prompt_fills_the_limit_with_whole_sentences(self) -> None:
        prompt = prompts.system_prompt(100, words)
        assert 85 <= words(prompt) <= 100
        assert prompt.startswith(prompts.OPENING)
        assert prompt.endswith(".")
        assert prompt in prompts.system_prompt(200, words)

    def test_the_opening_is_always_there(self) -> None:
        assert prompts.system_prompt(0, words) == prompts.OPENING


class TestClient:
    STREAM = (
        b": keepalive 10/20\n",
        b"\n",
        b'data: {"choices": [{"delta": {"role": "assistant", "content": "Par"}}]}\n',
        b'data: {"choices": [{"delta": {"content": "is"}}]}\n',
        b'data: {"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 20,'
        b' "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 12}}}\n',
        b"data: [DONE]\n",
        b"data: not read\n",
    )

    def test_the_first_piece_of_the_answer_stops_the_clock(self) -> None:
        """Not a keepalive, and not a later piece; whoever waits for it is told once."""
        clock, told = iter([0.5, 0.6, 0.7, 0.8]), []
        reply = client.read_stream(self.STREAM, lambda: next(clock), lambda: told.append(1))
        assert reply == client.Reply("Paris", 20, 12, 0.5, 0.8, 3)
        assert told == [1]

    def test_a_stream_of_completions_holds_its_text_elsewhere(self) -> None:
        lines = [
            b'data: {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 3,'
            b' "completion_tokens": 1}}'
        ]
        assert client.read_stream(lines, lambda: 1.0) == client.Reply("x", 3, 0, 1.0, 1.0, 1)

    @pytest.mark.parametrize("lines", [[], STREAM[:4]])
    def test_an_answer_that_breaks_off_is_an_error(self, lines: Sequence[bytes]) -> None:
        with pytest.raises(DemoError, match="broke off"):
            client.read_stream(lines, lambda: 0.0)

    def test_a_server_that_is_gone_is_an_error_with_its_log(self, tmp_path: Path) -> None:
        program = "import time; print('busy', flush=True); time.sleep(60)"
        with child(tmp_path, program) as silent:
            while not silent.log_text():
                time.sleep(0.01)
            with pytest.raises(DemoError, match=r"did not answer(.|\n)*busy"):
                client.chat(silent, [], max_tokens=1)


class TestServer:
    def test_free_ports_differ_and_are_free(self) -> None:
        ports = server.free_ports(8)
        assert len(set(ports)) == 8
        for port in ports:
            with socket.socket() as one:
                one.bind((server.HOST, port))

    def test_the_demos_flags_alone_decide(self) -> None:
        """The plugin's variables are kept from the servers; other variables are passed on."""
        environ = {
            "MLX_LM_KV_CACHE_BITS": "8",
            "MLX_LM_CACHE_MEMORY_MB": "1",
            "MLX_LM_DISABLE_PREFIX_CACHE": "1",
            "MLX_LM_KVCACHE_PLUGINS": "a",
            "PATH": "/bin",
        }
        passed = server.child_environment(environ, preload=None)
        assert environ.items() & passed.items() == {
            ("MLX_LM_KVCACHE_PLUGINS", "a"),
            ("PATH", "/bin"),
        }
        assert passed["HF_HUB_OFFLINE"] == "1"

    def test_openblas_goes_before_what_is_preloaded_already(self) -> None:
        preload = "libopenblas.so.0"
        assert server.child_environment({}, preload)["LD_PRELOAD"] == preload
        both = server.child_environment({"LD_PRELOAD": "other.so"}, preload)["LD_PRELOAD"]
        assert both == "libopenblas.so.0 other.so"
        assert "LD_PRELOAD" not in server.child_environment({}, None)

    def test_openblas_is_looked_for_on_linux_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.0")
        monkeypatch.setattr(sys, "platform", "linux")
        assert server.find_openblas() == "libopenblas.so.0"
        monkeypatch.setattr(sys, "platform", "darwin")
        assert server.find_openblas() is None

    def test_a_server_that_does_not_start_shows_its_log(self, tmp_path: Path) -> None:
        broken = child(tmp_path, "raise SystemExit('unrecognized arguments: --kv')")
        with broken, pytest.raises(DemoError) as caught:
            broken.wait_until_healthy()
        assert "exit status 1" in str(caught.value)
        assert "    unrecognized arguments: --kv" in str(caught.value)

    def test_a_server_that_never_answers_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "START_LIMIT_S", 0.2)
        silent = child(tmp_path, "import time; time.sleep(60)")
        with silent, pytest.raises(DemoError, match="did not answer within"):
            silent.wait_until_healthy()

    @pytest.mark.parametrize(
        "program",
        [
            "import time; print('up', flush=True); time.sleep(60)",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "print('up', flush=True); time.sleep(60)",
        ],
        ids=["obedient", "stubborn"],
    )
    def test_the_process_ends_with_the_block_whatever_happens(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
    ) -> None:
        monkeypatch.setattr(server, "STOP_LIMIT_S", 0.3)
        running = child(tmp_path, program)
        with pytest.raises(KeyboardInterrupt), running:
            while not running.log_text():
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert running._process is not None
        assert running._process.returncode is not None

    def test_a_missing_server_command_is_one_line(self, tmp_path: Path) -> None:
        absent = child(tmp_path, "")
        absent.command = [str(tmp_path / "mlx_lm.server")]
        with pytest.raises(DemoError, match="install mlx-lm"), absent:
            pass

    def test_only_the_end_of_a_log_is_shown(self) -> None:
        log = "\n".join(map(str, range(100)))
        assert server.log_tail(log, lines=2) == "    98\n    99"
        assert server.log_tail("") == "    (empty)"

    def test_the_log_is_read_once_it_is_quiet(self, tmp_path: Path) -> None:
        program = (
            "import time\nfor i in range(5): print(i, flush=True); time.sleep(0.1)\ntime.sleep(60)"
        )
        with child(tmp_path, program) as chatty:
            assert chatty.quiet_log_text(quiet_s=0.5).split() == list("01234")


class TestCommand:
    def test_a_failure_is_one_line_and_a_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(cache_dir: Path, progress: Progress) -> Path:
            raise DemoError("nothing there")

        monkeypatch.setitem(MODELS, "smollm2", replace(MODELS["smollm2"], ensure=fail))
        monkeypatch.setattr("signal.signal", lambda *_: None)
        assert __main__.main([]) == 1
        assert capsys.readouterr().err == "demo: nothing there\n"

    @pytest.mark.parametrize("argv", [["--turns", "0"], ["--turns", "99"], ["--model", "x"]])
    def test_a_wrong_argument_is_refused(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            __main__.parse(argv)
        assert caught.value.code == 2


@pytest.mark.slow
def test_both_chats_hit_only_where_something_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole demo against the stock server, with the model cut to two layers."""
    try:
        folder = smollm2.ensure_model(tmp_path, layers=2)
    except DemoError as error:
        pytest.skip(str(error))
    plan = Plan(turns=2, max_tokens=4, limit_s=10)
    flags_on, flags_off = ["--prompt-cache-size", "4"], ["--prompt-cache-size", "0"]
    text = __main__.run(MODELS["smollm2"], folder, plan, flags_on, flags_off)
    lines = [line.split() for line in text.splitlines() if line.startswith("chat")]
    cached = {" ".join(cells[:4]): int(cells[5].replace(",", "")) for cells in lines}
    assert cached["chat 1, turn 1"] == 0
    assert cached["chat 1, turn 2"] > 100
    assert cached["chat 2, turn 1"] > 100
    assert "does not say" in text  # stock logs no bytes that are fine enough
    assert capsys.readouterr().out.count("->") == 3
