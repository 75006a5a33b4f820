"""Tables and text at several terminal widths."""

import pytest

from superpod.cli import tables


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_folded_table_fits_and_keeps_every_word(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    cell = "TP2 PP8 VP12, mbs 1, embedding and loss as layers, recompute layernorm+moe_act"
    tables.print_folded_table(["layout", "GiB"], [[cell, "75.3"], ["DP only", "8.0"]])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines if line.strip().endswith(("75.3", "8.0"))] == ["TP2", "DP"]
    shown = " ".join(line.replace("75.3", "").strip() for line in lines[1:-1])
    assert " ".join(shown.split()) == cell


def test_table_lines_have_no_trailing_spaces(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tables.print_folded_table(["model", "tasks"], [["llama3_8b", "pretrain, sft, lora, dora"], ["tiny", "pretrain"]])
    lines = capsys.readouterr().out.split("\n")
    assert lines == ["model      tasks", "llama3_8b  pretrain, sft, lora, dora", "tiny       pretrain", ""]


def test_long_words_are_not_split(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    tables.print_folded_table(["layout", "GiB"], [["recompute layernorm+mla_up_proj", "75.3"]])
    tables.print_wrapped("to look closer: --layout tp=2,pp=8,vp=12,cp=2")
    out = capsys.readouterr().out
    assert "layernorm+mla_up_proj" in out
    assert "tp=2,pp=8,vp=12,cp=2" in out


def test_a_very_narrow_terminal_is_wrapped_at_the_smallest_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    tables.print_wrapped("many words that no single column holds")
    assert len(capsys.readouterr().out.splitlines()) < 5
