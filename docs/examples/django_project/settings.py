"""The least settings that Django needs. $DATABASE is the path of an SQLite file."""

import os

SECRET_KEY = "an example"
INSTALLED_APPS = ["jobs"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "site.db")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
