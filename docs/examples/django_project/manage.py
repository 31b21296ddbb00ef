"""Django: migrations that run once, and a management command that cron starts on every host.

    pip install 'multilock[redis]' django
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    cd docs/examples/django_project
    python manage.py migrate_once & python manage.py migrate_once; wait
    python manage.py nightly & python manage.py nightly; wait

You should see "Applying jobs.0001_initial" once, and the second migrate_once find nothing to do. One of the two nightly
commands makes the report, and the other prints that it has run. A third nightly command within a minute prints this,
too.

On PostgreSQL the lock can be in the migrated database itself, with 'multilock[postgresql]':

    export PGHOST=127.0.0.1 PGUSER=owner PGDATABASE=app MULTILOCK_URL=postgresql://
"""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
