"""The settings of the web site of a run, on the database of its workers."""

from tests.chaos.settings import *  # noqa: F403
from tests.chaos.settings import INSTALLED_APPS as OF_WORKERS
from tests.settings import APPS_OF_PAGES
from tests.settings import MIDDLEWARE as OF_PAGES
from tests.settings import TEMPLATES as ENGINES

INSTALLED_APPS = [*APPS_OF_PAGES, *OF_WORKERS]
MIDDLEWARE = OF_PAGES
TEMPLATES = ENGINES
ROOT_URLCONF = "tests.services.addresses"
