"""Names that do not exist, on the command line."""

from border.case import Case, check, command

CASES = [
    Case(
        "`spanwise methods grop`",
        lambda folder: command("methods", "grop"),
        "There is no method 'grop'. Did you mean 'grpo'? Known: ...",
    ),
]

test = check(CASES)
