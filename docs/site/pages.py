"""The pages that nobody writes by hand: one for each system of the literature, each verb, each part of the interface.

A system's page is made of what its policies declare (`About`), the opening of their modules, and its paragraph in
docs/systems.md; a verb's is its own help; the interface's come from docstrings.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from lowtide import registry
from lowtide.cli import VERBS, group
from lowtide.plan.policy import Family, Runs

DOCS = Path(__file__).parents[1]

# What the reference shows: a title, a sentence, and modules, whole or by name; of a class, all members or those named.
INTERFACE: dict[str, tuple[str, str, dict[str, Sequence[str]]]] = {
    "api": (
        "Training, inference and checkpoints",
        "The names that a program imports from `lowtide`.",
        {
            "lowtide": (
                *("fit", "Tide: step, on_step, stats, save, load, records, steps, trace, plan, machine, machine_of"),
                *("init", "serve", "load", "load_checkpoint", "save_checkpoint", "prepare", "sub_batches"),
                *("capture_step", "capture_model", "capture_script"),
            )
        },
    ),
    "errors": ("Errors", "Every error is a `LowtideError`, and says what to change.", {"lowtide.errors": ()}),
    "live": (
        "Watching a run",
        "Listeners for `Tide.on_step`. [How to use them](../../howto-watch.md).",
        {"lowtide.live": (), "lowtide.core.step_record": ()},
    ),
    "integrations": (
        "Integrations",
        "[How to use them](../../howto-integrations.md).",
        {
            "lowtide.integrations.accelerate": ("tide_of", "close"),
            "lowtide.integrations.huggingface": ("TideCallback", "TideMixin"),
            "lowtide.integrations.lightning": (),
        },
    ),
    "policies": (
        "Writing a policy",
        "What a policy is, and what it gets and returns. [How policies are judged](../../policies.md).",
        {"lowtide.plan.policy": (), "lowtide.core.plan": (), "lowtide.testing.policies": ()},
    ),
    "traces": (
        "Traces, machines and timelines",
        "The values that flow between the stages. [Their files](../../formats.md).",
        {"lowtide.core.trace": (), "lowtide.core.machine": (), "lowtide.core.timeline": ()},
    ),
    "simulation": (
        "Simulating and reporting",
        "A step on a virtual clock, and what is made of it.",
        {"lowtide.simulate": (), "lowtide.report": ()},
    ),
    "tiers": (
        "Tiers and codecs",
        "Where bytes live, and how they are encoded. [How to use them](../../howto-tiers.md).",
        {"lowtide.tiers": (), "lowtide.codecs": ()},
    ),
}

# Where the sidebar has them: below a section of docs/index.md.
SIDEBAR = {
    "Concepts": [("One page for each system", "generated/systems/index")],
    "Reference": [
        ("Commands", "generated/reference/commands"),
        *((title, f"generated/reference/{name}") for name, (title, _, _) in INTERFACE.items()),
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A paragraph of docs/systems.md: a published system, and the policies that are it."""

    policies: tuple[str, ...]
    name: str
    decides: str
    runs: str
    adapts: str
    filled_in: str

    @property
    def page(self) -> str:
        """The name of its page."""
        return self.policies[0]

    @property
    def short_name(self) -> str:
        """Its name, without its authors."""
        name = re.sub(r"\s*\(.*", "", self.name).strip()
        return self.policies[0] if name.startswith("none") else name


def write(folder: Path) -> None:
    """Write all generated pages into `folder`, and nothing else is left there."""
    shutil.rmtree(folder, ignore_errors=True)
    text = (DOCS / "systems.md").read_text()
    for system in systems(text):
        _put(folder / "systems" / f"{system.page}.md", "\n".join(system_page(system, text)))
    _put(folder / "systems" / "index.md", "\n".join(_systems_index(systems(text))))
    for name, (title, sentence, modules) in INTERFACE.items():
        _put(folder / "reference" / f"{name}.md", "\n".join(_interface_page(title, sentence, modules)))
    _put(folder / "reference" / "commands.md", "\n".join(_commands_page()))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


# ---- systems ----


_PARAGRAPH = re.compile(
    r"^(?P<policies>`\w+`(?:(?:, | to )`\w+`)*): (?P<name>.+?)\.?\n\n"
    r"- \*\*Decides\*\*: (?P<decides>.*?)\n"
    r"- \*\*Runs\*\*: (?P<runs>.*?)\.? \*\*Adapts\*\*: (?P<adapts>.*?)\n"
    r"(?:- \*\*Filled in, left out\*\*: (?P<filled_in>.*?)\n)?(?=\n|\Z)",
    re.MULTILINE | re.DOTALL,
)


def systems(text: str) -> list[System]:
    """Return the systems of docs/systems.md, each a paragraph that begins with its policies."""
    found: list[System] = []
    for told in _PARAGRAPH.finditer(text):
        name = told["name"]
        if name.startswith("the same"):
            name = found[-1].short_name + name.removeprefix("the same").replace("`", "")
        found.append(
            System(
                policies=tuple(_policies_in(told["policies"])),
                name=name,
                decides=told["decides"],
                runs=told["runs"],
                adapts=told["adapts"].rstrip("."),
                filled_in=told["filled_in"] or "",
            )
        )
    named = [policy for system in found for policy in system.policies]
    published = {name for name in registry.policy_names() if registry.policy(name).about.paper}
    missing = published - set(named) - {"belady"}  # the bound that all are compared with, not a system
    if missing:
        raise ValueError(f"docs/systems.md says nothing of: {', '.join(sorted(missing))}")
    return found


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("| ") and len(cells) == columns and not cells[0].startswith(("policy", "---")):
            yield cells


def _policies_in(cell: str) -> Iterator[str]:
    names = re.findall(r"`(\w+)`", cell)
    span = re.fullmatch(r"`([a-z]+)(\d+)` to `\1(\d+)`", cell)
    if span:
        names = [f"{span[1]}{number}" for number in range(int(span[2]), int(span[3]) + 1)]
    yield from names


def system_page(system: System, text: str) -> Iterator[str]:
    """Yield the lines of a system's page."""
    policies = [registry.policy(name) for name in system.policies]
    yield f"# {system.short_name}"
    yield ""
    for paper in dict.fromkeys(policy.about.paper for policy in policies if policy.about.paper):
        yield f"*{paper}*"
        yield ""
    yield "| policy | family | means | in one line |"
    yield "|---|---|---|---|"
    for policy in policies:
        about = policy.about
        does = "recomputes" if about.recomputes else "places" if about.family is Family.PLACEMENT else "swaps"
        yield f"| `{policy.name}` | {about.family} | {does} | {_cell(policy.summary)} |"
    yield ""
    yield "## What it decides"
    yield ""
    yield _sentence(_up(system.decides))
    yield ""
    yield "## How it runs here"
    yield ""
    yield f"- **Runs**: {_up(system.runs)}"
    yield f"- **Adapts to the budget**: {system.adapts}"
    if system.filled_in:
        yield f"- **Filled in or left out**: {_up(system.filled_in)}"
    yield ""
    for policy in policies:
        if policy.about.reconstructed and len(policies) > 1:
            yield f"- `{policy.name}` declares: {policy.about.reconstructed}"
    yield ""
    shapes = [row for row in _rows(text, columns=2) if _mentions(row, system)]
    if shapes:
        yield "## Published behaviour, and whether it shows here"
        yield ""
        yield "| published | here |"
        yield "|---|---|"
        for shape, here in shapes:
            yield f"| {_moved(shape)} | {_moved(here)} |"
        yield ""
    yield "## Try it"
    yield ""
    yield "```console"
    yield from (f"$ {command}" for command in commands_of(system))
    yield "```"
    yield ""
    for module in dict.fromkeys(type(policy).__module__ for policy in policies):
        yield f"The algorithm is in `{module.replace('.', '/')}.py`, which opens with:"
        yield ""
        yield "```text"
        yield (inspect.getdoc(sys.modules[module]) or "").strip()
        yield "```"
        yield ""
    yield "[All systems](../../systems.md) · [how policies are judged](../../policies.md)"


def commands_of(system: System) -> Iterator[str]:
    """Yield the commands of a system's page."""
    about = registry.policy(system.page).about
    if about.family is Family.PLACEMENT:
        yield f"lowtide estimate step.trace --machine optane --fast 60% --policy {system.page}"
    else:
        yield f"lowtide simulate step.trace --budget 60% --policy {system.page}"
    if Runs.REAL in about.runs:
        yield f"lowtide run --budget 2GiB --policy {system.page} train.py"


def _mentions(row: Sequence[str], system: System) -> bool:
    said = " ".join(row)
    word = re.split(r"'s|,| and | et al", system.short_name)[0]
    tests = {f"test_{policy}.py" for policy in system.policies}
    return bool(re.search(rf"\b{re.escape(word)}\b(?!\+)", said)) or any(test in said for test in tests)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _moved(text: str) -> str:
    """Return a text of docs/systems.md whose links work from a system's page."""
    return re.sub(r"\]\((?=[\w-]+\.md)", "](../../", text).replace("](#", "](../../systems.md#")


def _up(text: str) -> str:
    moved = _moved(text)
    return moved[:1].upper() + moved[1:]


def _sentence(text: str) -> str:
    return text if text.endswith((".", ")")) else f"{text}."


def _systems_index(found: Sequence[System]) -> Iterator[str]:
    yield "# One page for each system"
    yield ""
    yield "Made from what the policies declare and from [the page of systems](../../systems.md)."
    yield ""
    yield "```{toctree}"
    yield ":maxdepth: 1"
    yield ""
    yield from (system.page for system in found)
    yield "```"


def with_links_to_systems(text: str) -> str:
    """Return docs/systems.md with the policies that begin a paragraph linked to their pages."""

    def linked(told: re.Match[str]) -> str:
        policies = told["policies"]
        return told[0].replace(policies, f"[{policies}](generated/systems/{next(_policies_in(policies))}.md)", 1)

    return _PARAGRAPH.sub(linked, text)


# ---- the command line ----


def _commands_page() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield "Each command's own help."
    for verb in VERBS:
        context = click.Context(group, info_name="lowtide", max_content_width=88)
        command = group.get_command(context, verb)
        assert command is not None
        yield ""
        yield f"## lowtide {verb}"
        yield ""
        yield "```text"
        yield command.get_help(click.Context(command, parent=context, info_name=verb, max_content_width=88))
        yield "```"


# ---- the interface ----


def _interface_page(title: str, sentence: str, modules: dict[str, Sequence[str]]) -> Iterator[str]:
    yield f"# {title}"
    yield ""
    yield sentence
    for module, names in modules.items():
        yield ""
        if len(modules) > 1 and not names:
            yield f"## {module}"
            yield ""
        yield "```{eval-rst}"
        if names:
            for entry in names:
                name, _, members = entry.partition(": ")
                yield f".. {'autoclass' if name[:1].isupper() else 'autofunction'}:: {module}.{name}"
                if name[:1].isupper():
                    yield f"   :members: {members}"
                yield ""
        else:
            yield f".. automodule:: {module}"
            yield "   :members:"
        yield "```"


def restructured(lines: Iterable[str]) -> list[str]:
    """Return a docstring of Markdown as reStructuredText.

    One backtick becomes two, and a paragraph that explains one argument after the other a list.
    """
    paragraphs = []
    for paragraph in "\n".join(lines).split("\n\n"):
        arguments = re.split(r"(?<=[.)])\s+(?=`\w+`(?: and `\w+`)?(?: \([^)]*\))?(?::| are | is ))", paragraph)
        if len(arguments) > 2 and "\n    " not in paragraph:
            paragraph = "\n".join("- " + argument.replace("\n", "\n  ") for argument in arguments)
        paragraphs.append(
            re.sub(r"(?<![`:\w])`([^`]+)`(?!`)", lambda code: f"``{' '.join(code[1].split())}``", paragraph)
        )
    return "\n\n".join(paragraphs).split("\n")
