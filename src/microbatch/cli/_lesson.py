"""``microbatch lesson``: show one, or check a learner's own solution."""

import json
import os
from pathlib import Path

from microbatch.cli._errors import UsageError
from microbatch.cli._target import load_file, member
from microbatch.lessons import LESSONS, Exercise, Outcome, check, load
from microbatch.lessons._exercise import words
from microbatch.report import Screen


def show_lesson(name: str) -> int:
    """Prints the lesson's picture."""
    screen = Screen()
    lesson = load(_known(name))
    screen.say(LESSONS[name], "bold")
    screen.say()
    for line in lesson.picture():
        screen.say(line)
    screen.say()
    screen.say(f"Now write it yourself: {lesson.EXERCISE.task}")
    screen.say(f"and check it with: microbatch lesson {name} --check FILE.py")
    return 0


def check_lesson(name: str, path: str) -> int:
    """Runs the learner's function on the lesson's inputs; 0 when all pass, else 1."""
    screen = Screen()
    exercise: Exercise = load(_known(name)).EXERCISE
    module = load_file(path)
    function = member(module, exercise.function, path)
    seen = HintsSeen(name, path)
    outcomes = check(exercise, function, seen.counts)
    seen.update(outcomes)
    screen.say(f"{exercise.function} in {path}", "bold")
    for outcome in outcomes:
        _say(outcome, screen)
    passed = sum(outcome.passed for outcome in outcomes)
    good = passed == len(outcomes)
    screen.say()
    screen.verdict(f"{passed} of {len(outcomes)} pass.", good)
    return 0 if good else 1


class HintsSeen:
    """How many hints of each case a learner has had for a file, kept between runs so that the next one comes."""

    def __init__(self, lesson: str, path: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._file = Path(cache) / "microbatch" / "lessons.json"
        self._key = f"{lesson} {Path(path).resolve()}"
        self.counts: dict[str, int] = self._read().get(self._key, {})

    def update(self, outcomes: list[Outcome]) -> None:
        """Counts the hints just given; a case that passes starts anew."""
        counts = {
            o.case.name: self.counts.get(o.case.name, 0) + 1 for o in outcomes if not o.passed
        }
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._read() | {self._key: counts}))
        except OSError:
            # Without a place to remember in, the first hint comes again.
            return

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            return json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}


def _known(name: str) -> str:
    if name not in LESSONS:
        raise UsageError(f"there is no lesson {name!r}.\nChoose {', '.join(LESSONS)}.")
    return name


def _say(outcome: Outcome, screen: Screen) -> None:
    mark, style = ("ok  ", "green") if outcome.passed else ("FAIL", "red")
    screen.say()
    screen.say(f"{mark}  {outcome.case.name}: {outcome.case.call}", style)
    screen.say(f"      came   {outcome.came}")
    screen.say(f"      right  {words(outcome.case.right)}")
    if outcome.hint:
        screen.say(f"      hint   {outcome.hint}")
