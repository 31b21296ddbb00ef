"""Accounts."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    print("creating accounts", flush=True)
    time.sleep(0.5)  # stands for a long migration
    op.create_table("accounts", sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.Text))


def downgrade() -> None:
    op.drop_table("accounts")
