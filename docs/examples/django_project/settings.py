"""The least settings that Django needs. $DATABASE is the path of an SQLite file, or $PGDATABASE one of PostgreSQL."""

import os

SECRET_KEY = "an example"
INSTALLED_APPS = ["jobs"]
if "PGDATABASE" in os.environ:  # the rest is in $PGHOST, $PGUSER …, which postgresql:// of multilock reads as well
    DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}}
else:
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "site.db")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
