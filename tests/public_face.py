"""What a user can call: `python tests/public_face.py` writes the signatures to public_signatures.txt."""

import dataclasses
import inspect
import re
import typing
from importlib import import_module
from pathlib import Path

from trl.trainer.grpo_config import GRPOConfig

from spanwise.cli import app
from spanwise.engines.trl import SpanGRPOConfig
from spanwise.types import ByCompletion

FILE = Path(__file__).with_name("public_signatures.txt")
ROOMS = ("spanwise", "spanwise.credit", "spanwise.score", "spanwise.segment", "spanwise.explain", "spanwise.losses",
         "spanwise.measure", "spanwise.fidelity", "spanwise.rollouts", "spanwise.trajectories", "spanwise.engines.tinker",
         "spanwise.engines.trl", "spanwise.report", "spanwise.tasks", "spanwise.testing")  # fmt: skip


def lines():
    """One line for each public function, class and its public methods, in alphabetical order."""
    entries = []
    for room in ROOMS:
        module = import_module(room)
        for name in module.__all__:
            entries += _of(f"{room}.{name}", getattr(module, name))
    return sorted([*entries, *_of_the_command_line(), *_of_the_trainer()])


def _of_the_command_line():
    entries = []
    for command in app:
        if command.startswith("-"):  # --help and --version, which cyclopts brings
            continue
        parts = []
        for p in arguments_of(app[command].default_command):
            default = "" if p.default is p.empty else f"={p.default!s}"
            option = "--" + p.name.rstrip("_").replace("_", "-") if p.kind is p.KEYWORD_ONLY else p.name.upper()
            parts.append(option + default)
        entries.append(" ".join(["$ spanwise", command, *parts]))
    return entries


def arguments_of(command):
    """The arguments of a command; options that several commands share one by one."""
    hints = typing.get_type_hints(command)
    for p in inspect.signature(command).parameters.values():
        shared = dataclasses.is_dataclass(hints[p.name])
        yield from arguments_of(hints[p.name]) if shared else [p]


def _of_the_trainer():
    """What `SpanGRPOConfig` adds to TRL's configuration or sets otherwise; the rest is TRL's."""
    theirs = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    ours = [f for f in dataclasses.fields(SpanGRPOConfig) if f.name not in theirs or f.default != theirs[f.name]]
    return [f"spanwise.engines.trl.SpanGRPOConfig({', '.join(f'{f.name}={f.default!r}' for f in ours)})"]


def _of(name, exported):
    if inspect.isclass(exported) and issubclass(exported, Exception):
        return [name]
    if dataclasses.is_dataclass(exported) and inspect.isclass(exported) and exported is not SpanGRPOConfig:
        attributes = {**(vars(ByCompletion) if issubclass(exported, ByCompletion) else {}), **vars(exported)}
        members = [_signature(f"{name}.{n}", m) for n, m in attributes.items() if not n.startswith("_") and _callable(m)]
        absent = dataclasses.MISSING
        required = {f.name for f in dataclasses.fields(exported) if f.default is absent and f.default_factory is absent}
        fields = ", ".join(f.name + "=..." * (f.name not in required) for f in dataclasses.fields(exported) if f.init)
        return [f"{name}({fields})", *members]
    if exported is SpanGRPOConfig:
        return []  # see `_of_the_trainer`
    if inspect.isfunction(exported):
        return [_signature(name, exported)]
    return [name]


def _callable(member):
    return inspect.isfunction(member) or isinstance(member, staticmethod)


def _signature(name, function):
    parameters = []
    for p in inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters.values():
        spelled = {p.VAR_POSITIONAL: f"*{p.name}", p.VAR_KEYWORD: f"**{p.name}"}.get(p.kind, p.name)
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters and not any(x.startswith("*") for x in parameters):
            parameters.append("*")
        default = "" if p.default is p.empty else f"={p.default!r}"
        parameters.append(re.sub(r" at 0x\w+", "", spelled + default))
    return f"{name}({', '.join(parameters)})"


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
