"""Names by which things are chosen."""

import pytest

from kvfold.errors import ConfigError
from kvfold.registry import Registry


def test_entries_come_in_the_order_of_registration():
    table: Registry[int] = Registry("method")
    assert table.register("b", 2) == 2
    table.register("a", 1)
    assert list(table) == ["b", "a"]
    assert table["a"] == 1
    assert "b" in table
    assert "c" not in table


def test_an_unknown_name_lists_the_choices():
    table: Registry[int] = Registry("method")
    table.register("snapkv", 1)
    table.register("h2o", 2)
    with pytest.raises(ConfigError, match="unknown method 'h20': choose one of snapkv, h2o"):
        table["h20"]


def test_a_name_is_taken_once():
    table: Registry[int] = Registry("policy")
    table.register("h2o", 1)
    with pytest.raises(ConfigError, match="policy 'h2o' is registered twice"):
        table.register("h2o", 2)
    assert table["h2o"] == 1
