"""pdscope-run on a stand-in library: options, exit statuses, streams, traces.

Holds the issue's point 2 (pdscope-run; exit status 0, 1 with one line and no traceback, 2 for
usage), point 7 (--trace, PDSCOPE_DEBUG), and invalid UTF-8.
"""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import fake_plan
from support.plans import PlanStore

from pdscope import sampling
from pdscope.cli import run
from pdscope.cli._common import Command
from pdscope.plan import Plan

WHOLE = " world! \U0001f600\u4e2d STOP here now.\n\ufffdABC"


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> str:
    return str(plans.once("fake", fake_plan.make_fake_plan))


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


class Invoke:
    """Runs a command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.capsys, self.patch = capsys, patch

    def __call__(self, command: Command, *args: str, stdin: bytes | None = None) -> Result:
        self.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        with pytest.raises(SystemExit) as caught:
            command.main(list(args))
        captured = self.capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, captured.out, captured.err)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    return Invoke(capsys, monkeypatch)


def test_prompt_streams_to_stdout_and_speed_to_stderr(invoke: Invoke, plan: str) -> None:
    done = invoke(run.main, plan, "--prompt", "Hello", "--max-new-tokens", "18")
    assert done.status == 0
    assert done.out == WHOLE + "\n"
    assert done.err.startswith("[prefill 2 tokens in ") and "tok/s" in done.err
    assert "stopped by length" in done.err


def test_stdin_is_the_prompt_without_its_last_newline(invoke: Invoke, plan: str) -> None:
    for data in (b"Hello", b"Hello\n", b"Hello\r\n"):
        done = invoke(run.main, plan, "-n", "2", "--json", stdin=data)
        assert json.loads(done.out)["text"] == " world", data


def test_json_says_where_threads_and_weights_are(invoke: Invoke, plan: str) -> None:
    for pin, weights, cpus in (("on", "copy", [0]), ("off", "mmap", [])):
        options = ("--pin", pin, "--weights", weights)
        said = json.loads(invoke(run.main, plan, "-p", "C", "-n", "1", "--json", *options).out)
        assert said["placement"]["weights"] == weights
        assert said["placement"]["pinned_cpus"] == cpus
        assert said["placement"]["threads"] == said["threads"]


def test_json_says_which_predictors_serve(invoke: Invoke, plan: str) -> None:
    def said(*options: str) -> dict[str, Any]:
        done = invoke(run.main, plan, "-p", "C", "-n", "1", "--json", *options)
        return dict(json.loads(done.out)["predictor"])

    report = said()
    assert (report["asked"], report["state"]) == ("auto", "off")
    assert report["bytes"] == 0 and report["chosen"] == {} and report["why"]
    assert said("--predictor", "off")["why"] == "asked for"
    assert invoke(run.main, plan, "-p", "C", "--predictor", "on").status == 2


def test_json_says_what_cache_prefetch_does(
    invoke: Invoke, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*options: str) -> dict[str, Any]:
        done = invoke(run.main, plan, "-p", "C", "-n", "1", "--json", *options)
        return dict(json.loads(done.out)["cache_prefetch"])

    report = said("--cache-prefetch", "on")
    assert report["asked"] == "on" and report["why"] == "fake"
    assert report["decode"] == {"state": "on", "measurements": 2, "gain_percent": 1.25}
    assert report["batch"] == {"state": "measuring", "measurements": 0, "gain_percent": None}
    counts = {"experts_predicted": 10, "experts_hit": 7}
    counts |= {"bytes": 8192, "useful_bytes": 4096, "wasted_bytes": 4096}
    assert {key: report[key] for key in counts} == counts
    assert said()["asked"] == "auto"
    monkeypatch.setenv("PDSCOPE_CACHE_PREFETCH", "off")
    assert said()["asked"] == "off"
    assert said("--cache-prefetch", "auto")["asked"] == "auto"
    monkeypatch.setenv("PDSCOPE_CACHE_PREFETCH", "maybe")
    done = invoke(run.main, plan, "-p", "C")
    assert done.status == 1 and "PDSCOPE_CACHE_PREFETCH" in done.err


def test_json(invoke: Invoke, plan: str) -> None:
    done = invoke(run.main, plan, "-p", "Hello", "-n", "4", "--json", "--seed", "3")
    report = json.loads(done.out)
    assert report["text"] == " world! " and report["tokens"] == [6, 7, 8, 9]
    assert report["stop_reason"] == "length" and report["prompt_tokens"] == 2
    assert report["seed"] is None  # greedy
    assert report["timings"]["load_seconds"] > 0
    assert report["timings"]["decode_tokens_per_second"] > 0
    assert report["plan_hash"] == Plan.open(plan).plan_hash and report["isa"] == "fake"
    assert done.err == ""


def test_chat_and_system(invoke: Invoke, plan: str) -> None:
    done = invoke(run.main, plan, "--chat", "-p", "Hello", "-n", "1", "--json")
    assert json.loads(done.out)["prompt_tokens"] == 4
    with_system = ("--chat", "--system", "B", "-p", "Hello", "-n", "1", "--json")
    done = invoke(run.main, plan, *with_system)
    assert json.loads(done.out)["prompt_tokens"] > 4


def test_stop_eos_and_sampling_options(invoke: Invoke, plan: str) -> None:
    done = invoke(run.main, plan, "-p", "Hello", "--stop", "here", "--stop", "zzz", "--json")
    assert json.loads(done.out)["stop_reason"] == "stop"
    done = invoke(run.main, plan, "-p", "C", "-n", "90", "--json")
    assert json.loads(done.out)["stop_reason"] == "eos"
    done = invoke(run.main, plan, "-p", "C", "-n", "90", "--ignore-eos", "--json")
    assert json.loads(done.out)["stop_reason"] == "length"
    options = ("--temperature", "1", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1")
    more = ("--repetition-penalty", "1.1", "--seed", "7", "--json", "-n", "5", "--threads", "2")
    runs = [json.loads(invoke(run.main, plan, "-p", "C", *options, *more).out) for _ in range(2)]
    assert runs[0]["tokens"] == runs[1]["tokens"] and runs[0]["seed"] == 7
    assert runs[0]["threads"] == 2


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (("-p", ""), None, "the prompt is empty"),
        ((), b"", "the prompt is empty"),
        ((), b"\n", "the prompt is empty"),
        ((), b"ab\xffc", "not valid UTF-8 (byte 0xff at offset 2)"),
        (("-p", "a\udcff"), None, "the prompt is not valid UTF-8"),
        (("--chat", "-p", "a\udcff"), None, "not valid UTF-8"),
        (("-p", "A" * 200), None, "the plan's context is 96"),
        (("-p", "A", "--isa", "nonsense"), None, "unknown kernel path"),
        (("-p", "A", "--stop", ""), None, "a stop string is empty"),
        (("-p", "A", "--stop", "\udcff"), None, "error: --stop is not valid UTF-8"),
        (
            ("--chat", "-p", "A", "--system", "a\udcff"),
            None,
            "error: --system is not valid UTF-8 (at character 1)",
        ),
        (("-p", "A", "--trace", "/no/such/folder/t.json"), None, "there is no folder"),
    ],
)
def test_faults_are_one_line_and_status_1(
    invoke: Invoke, plan: str, args: tuple[str, ...], stdin: bytes | None, message: str
) -> None:
    done = invoke(run.main, plan, *args, stdin=stdin)
    assert done.status == 1
    line = done.err.strip().splitlines()[-1]
    assert line.startswith("error: ") and message in line
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_missing_plan(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke(run.main, "", "-p", "A").err == (
        "error: 'PLAN' has an empty name; expected a path\n"
    )
    done = invoke(run.main, str(tmp_path / "none"), "-p", "A")
    assert done.status == 1 and "no such directory" in done.err


@pytest.mark.parametrize(
    "args",
    [
        ("--nonsense",),
        ("-p", "A", "-n", "0"),
        ("-p", "A", "--temperature", "-1"),
        ("-p", "A", "--temperature", "1e-40"),
        ("-p", "A", "--temperature", "1e39"),
        ("-p", "A", "--top-k", "99999999999"),
        ("-p", "A", "--repetition-penalty", "1e-300"),
        ("-p", "A", "--repetition-penalty", "1e39"),
        ("-p", "A", "--top-p", "0"),
        ("-p", "A", "--min-p", "2"),
        ("-p", "A", "--seed", "x"),
        ("-p", "A", "--system", "B"),
    ],
)
def test_wrong_usage_is_status_2(invoke: Invoke, plan: str, args: tuple[str, ...]) -> None:
    done = invoke(run.main, plan, *args)
    assert done.status == 2 and "Usage: " in done.err


def test_help_names_the_ranges_of_sampling(invoke: Invoke) -> None:
    """They are those of the runtime's float32 and int32, as the Python API has them."""
    assert (run._LEAST, run._MOST) == (sampling.LEAST, sampling.MOST)
    words = " ".join(invoke(run.main, "--help").out.split())
    assert "Else at least 1.2e-38. [default: 0.0; 0<=x<=3.4e+38]" in words
    assert "0<=x<=2147483647" in words and "1.2e-38<=x<=3.4e+38" in words


def test_help_teaches(invoke: Invoke) -> None:
    done = invoke(run.main, "--help")
    assert done.status == 0
    assert "pdscope-run plan/ --prompt" in done.out and "PDSCOPE_DEBUG" in done.out


def test_trace_is_perfetto_json(invoke: Invoke, plan: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    assert invoke(run.main, plan, "-p", "Hello", "-n", "3", "--trace", str(file)).status == 0
    data = json.loads(file.read_text())
    events = data["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {1: "cpu"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 3 * (fake_plan.LAYERS + 1)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["tid"] in tracks for e in slices)
    expert = next(e for e in slices if e["name"] == "expert l1")
    assert expert["args"] == {"layer": 1, "instr": 0, "rows": 2, "experts": 2, "bytes": 1000}
    assert data["otherData"]["dropped"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_debug_levels(invoke: Invoke, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_DEBUG", "1")
    done = invoke(run.main, plan, "-p", "Hello", "-n", "3")
    assert "isa fake, 1 threads" in done.err and "GB/s" not in done.err
    monkeypatch.setenv("PDSCOPE_DEBUG", "6")
    done = invoke(run.main, plan, "-p", "Hello", "-n", "3")
    assert "GB/s" in done.err and "expert" in done.err
    assert done.out == " world!\n"


def test_conversation(
    invoke: Invoke, plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Hello", "", "A", "/clear", "B" * 200, "Hello"])

    def ask(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(SystemExit) as caught:
        run.main.main([plan, "--chat", "-n", "2"])
    captured = capsys.readouterr()
    assert caught.value.code == 0
    # The model says the successor of <assistant>, id 5.
    assert captured.out == "Hello wor\n" * 3
    assert captured.err.count("stopped by length") == 3
    assert "forget it with /clear" in captured.err


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_line_that_is_not_utf8_in_a_conversation(plan: str, locale: str) -> None:
    """Holds: invalid UTF-8. The line is refused, and the conversation goes on."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "LC_ALL": locale}
    with subprocess.Popen(
        command(plan, "--chat", "-n", "2"),
        **{"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        env=environment,
    ) as process:
        os.close(theirs)
        os.write(ours, b"caf\xe9\nHello\n\x04")  # the last is Ctrl-D
        out, err = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0 and b"Traceback" not in err
    assert err.count(b"error: the line is not valid UTF-8: type it again") == 1
    assert out == b"> > Hello wor\n> "


def test_conversation_refuses_surrogates(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What input() makes of foreign bytes where the locale lets them in."""
    lines = iter(["caf\udce9", EOFError()])

    def ask(_: str) -> str:
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(run, "_terminal", lambda: True)
    with pytest.raises(SystemExit) as caught:
        run.main.main([plan, "--chat"])
    assert caught.value.code == 0
    assert "the line is not valid UTF-8: type it again" in capsys.readouterr().err


def changed(plan: str, folder: Path, config: dict[str, Any] | None, **manifest: Any) -> str:
    """A copy of the plan with another tokenizer_config.json, or other fields of plan.json."""
    shutil.copytree(plan, folder)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    fake_plan.write_manifest(folder, **manifest)
    return str(folder)


def test_plan_without_a_tokenizer_says_so(invoke: Invoke, plan: str, tmp_path: Path) -> None:
    """Holds: a model directory without a tokenizer gives a plan that takes token ids alone."""
    bare = changed(plan, tmp_path / "p", None, tokenizer={"file": None, "chat_template": False})
    for options in ((), ("--chat",)):
        done = invoke(run.main, bare, "-p", "Hello", *options)
        assert done.status == 1 and done.err.count("\n") == 1
        assert f"{bare}: this plan has no tokenizer" in done.err and "generate(ids)" in done.err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('only one turn') }}", "chat_template: refuses the messages (only one"),
        ("{{ messages[0].images[0] }}", "chat_template: cannot render these messages ("),
        ("{% if %}", "chat_template: is no template that jinja reads ("),
        ([{"name": "rag", "template": "x"}], "templates named rag, expected one named default"),
    ],
)
def test_chat_template_that_fails(
    invoke: Invoke, plan: str, tmp_path: Path, template: Any, words: str
) -> None:
    """Holds: status 1 with one line that names the template and what jinja says."""
    other = changed(plan, tmp_path / "p", {"chat_template": template})
    done = invoke(run.main, other, "--chat", "-p", "Hello")
    assert done.status == 1 and done.err.count("\n") == 1
    assert done.err.startswith(f"error: {other}") and words in done.err
    assert invoke(run.main, other, "-p", "Hello", "-n", "1").status == 0


def test_terminal_without_a_prompt_is_usage(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(SystemExit) as caught:
        run.main.main([plan])
    assert caught.value.code == 2 and "Give --prompt" in capsys.readouterr().err


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "pdscope.cli.run", *args]


def test_interrupt_is_status_130(plan: str) -> None:
    environment = {**os.environ, "FAKE_STEP_MS": "500"}
    with subprocess.Popen(
        command(plan, "-p", "Hello", "-n", "95", "--ignore-eos"),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b" "
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert b"Traceback" not in process.stderr.read()


def test_closed_pipe_is_quiet(plan: str) -> None:
    environment = {**os.environ, "FAKE_STEP_MS": "500"}
    with subprocess.Popen(
        command(plan, "-p", "Hello", "-n", "90", "--ignore-eos"),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(120) == 1
        assert process.stderr.read() == b""


LONG_HELP = "from pdscope.cli import compile_command as main; main()"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["run", "help", "long help", "inspect"])
def test_full_standard_output(plan: str, name: str, unbuffered: str) -> None:
    """Disk full: the message says what could not be written, and there is nothing else at exit."""
    arguments = {
        "run": command(plan, "-p", "Hello", "-n", "3"),
        "help": command("--help"),
        # More than a block of the buffer, which keeps nothing of what was not taken.
        "long help": [sys.executable, "-c", LONG_HELP, "--help"],
        "inspect": [sys.executable, "-m", "pdscope.cli.inspect", plan],
    }[name]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            arguments, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output: cannot be written: No space left")
    assert "free some space" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_trace_on_a_full_disk(plan: str) -> None:
    """Disk full: the message names the trace file."""
    done = subprocess.run(
        command(plan, "-p", "Hello", "-n", "3", "--trace", "/dev/full"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: /dev/full: cannot be written: No space left")
    assert "free some space" in line


def test_running_imports_neither_torch_nor_transformers(plan: str) -> None:
    """Holds the issue's line on what running a plan imports; jinja2 comes with --chat only."""
    script = (
        "import sys; from pdscope.cli.run import main\n"
        "try: main.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    for options, extra in ((("--json",), set()), (("--chat",), {"jinja2"})):
        args = [sys.executable, "-c", script, plan, "-p", "Hello", "-n", "3", *options]
        done = subprocess.run(args, capture_output=True, text=True, check=True)
        loaded = set(done.stderr.splitlines()[-1].split())
        heavy = {"torch", "transformers", "safetensors", "archspec", "jsonschema", "rich", "jinja2"}
        assert loaded & heavy == extra


def test_closed_standard_streams(plan: str) -> None:
    """Holds: status 1 with one line and no traceback."""
    line = f"'{sys.executable}' -m pdscope.cli.run '{plan}'"
    done = subprocess.run(["sh", "-c", line + " <&-"], capture_output=True, text=True)
    assert done.returncode == 1 and "standard input is closed" in done.stderr
    done = subprocess.run(["sh", "-c", line + " -p Hello -n 2 >&-"], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_debug_2_says_timings(
    invoke: Invoke, plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDSCOPE_DEBUG", "2")
    trace = tmp_path / "link.json"
    trace.symlink_to(tmp_path / "real.json")
    done = invoke(run.main, plan, "-p", "Hello", "-n", "4", "--trace", str(trace))
    assert "3 decode steps: mean " in done.err
    assert trace.is_symlink() and json.loads(trace.read_text())["traceEvents"]


def test_threads_out_of_range(invoke: Invoke, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_THREADS", "9" * 5000)
    done = invoke(run.main, plan, "-p", "Hello")
    assert done.status == 1 and "PDSCOPE_THREADS" in done.err
