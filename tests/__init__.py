"""Tests of Lorry; `tests.models` and `tests.adapters` are what they share."""
