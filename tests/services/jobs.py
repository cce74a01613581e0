from tests.services import services  # noqa: F401 - registers them
