"""The amounts beside a compile's bars (issue: "Progress bar")."""

from rich.progress import Progress, Task

from pdscope.cli.progress import CompileProgress, _Amount


def shown(**fields: object) -> str:
    bars = Progress(disable=True)
    bars.add_task("stage", **fields)  # type: ignore[arg-type]
    task: Task = bars.tasks[0]
    return _Amount().render(task).plain


def test_amounts_are_in_the_unit_of_the_stage() -> None:
    assert shown(total=4096, completed=1536, unit="bytes") == "1.5 KiB of 4.0 KiB"
    assert shown(total=100_000, completed=8192, unit="tokens") == "8,192 of 100,000 tokens"
    assert shown(total=None, unit="bytes") == shown(total=None) == ""


def test_stages_follow_one_another() -> None:
    with CompileProgress(quiet=True) as progress:
        progress.start("read calibration", 0)
        progress.start("collect traces", 100, "tokens")
        progress.advance(30)
        (task,) = progress._bars.tasks
        assert (task.description, task.completed, task.total) == ("collect traces", 30, 100)
