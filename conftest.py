"""The suites of tests/ and lab/tests have the same rules."""

pytest_plugins = ["tests.suite"]
