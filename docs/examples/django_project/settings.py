"""The minimal settings for Django. Set $DATABASE to the path of an SQLite file, or $PGDATABASE for PostgreSQL."""

import os

SECRET_KEY = "an example"
INSTALLED_APPS = ["jobs"]
if "PGDATABASE" in os.environ:  # libpq reads $PGHOST, $PGUSER …, and so does multilock for postgresql://
    DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}}
else:
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "site.db")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
