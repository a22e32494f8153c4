"""settings/switch.py: what is on, what is off, what is refused."""

from __future__ import annotations

import pytest

from ascend_rl.settings.switch import CannotWork, refuse, switched_on


@pytest.mark.parametrize(
    "text, on", [("1", True), ("true", True), (" True ", True), ("0", False), ("", False)]
)
def test_a_switch_is_on_or_off(monkeypatch, text, on):
    monkeypatch.setenv("SOME_SWITCH", text)
    assert switched_on("SOME_SWITCH") is on
    assert switched_on("SOME_SWITCH", {"SOME_SWITCH": text}) is on


@pytest.mark.parametrize("text", ["2", "on", "yes please", "01"])
def test_any_other_value_is_refused_by_name(text):
    with pytest.raises(CannotWork, match="SOME_SWITCH=.*give 1 or 0"):
        switched_on("SOME_SWITCH", {"SOME_SWITCH": text})


def test_all_reasons_are_given_together():
    refuse("X=1", iter(()))
    with pytest.raises(CannotWork) as raised:
        refuse("X=1", (f"reason {number}" for number in (1, 2)))
    assert str(raised.value).splitlines() == [
        "X=1 is incompatible with this configuration:",
        "  reason 1",
        "  reason 2",
    ]
