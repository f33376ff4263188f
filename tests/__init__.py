"""Tests, by room: tests/<room>/test_<file>.py is of hookcb/<room>/<file>.py."""
