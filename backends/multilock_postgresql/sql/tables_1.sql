-- The tables, layout 1. They are made once, in one transaction with the functions. @S@ stands for the schema.
-- A migration may run all this again and stay open for minutes, so nothing here locks a table that exists: renewals would
-- wait for it. CREATE INDEX IF NOT EXISTS and CREATE OR REPLACE TRIGGER do lock their table.
CREATE TABLE IF NOT EXISTS @S@.locks (
  key      text COLLATE "C" PRIMARY KEY,   -- prefix and escaped name
  id       text COLLATE "C",               -- claim id of the only holder; '#r' or '#p<n>' if table holders has them; '#rest.<id>'; NULL if free
  who      text,                           -- the owner text, from its '@'
  token    bigint NOT NULL,                -- of the last grant
  ttl      bigint NOT NULL DEFAULT 0,      -- ms
  until    timestamptz,                    -- by this server's clock_timestamp(); NULL if free or shared
  sure     timestamptz,                    -- after a crash (boot differs from alive.boot) no claim enters before this time: see pass_1
  boot     text,                           -- alive.boot at the time of the handover
  followed timestamptz                     -- until then each change of holder is notified
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS @S@.holders (   -- readers and permits
  id    text COLLATE "C" PRIMARY KEY,      -- claim id, or '#rest.<id>'
  key   text COLLATE "C" NOT NULL,
  who   text NOT NULL,
  token bigint NOT NULL,
  ttl   bigint NOT NULL,
  until timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE UNLOGGED TABLE IF NOT EXISTS @S@.queue (
  ticket  bigint GENERATED ALWAYS AS IDENTITY,
  key     text COLLATE "C" NOT NULL,
  id      text COLLATE "C" PRIMARY KEY,
  who     text NOT NULL,
  mode    text COLLATE "C" NOT NULL,       -- 'x', 'r', 'p<n>'
  until   timestamptz NOT NULL,            -- the waiter counts as alive until then
  echo    text,                            -- of the request that set until; NULL if a push can only be a hint
  listens boolean NOT NULL                 -- whether the listener of its client holds the client's advisory lock
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
DO $$ BEGIN
  IF to_regclass('@S@.holders_by_key') IS NULL THEN
    CREATE INDEX holders_by_key ON @S@.holders (key);  -- without until, so that renewals stay HOT
  END IF;
  IF to_regclass('@S@.queue_by_key') IS NULL THEN
    CREATE INDEX queue_by_key ON @S@.queue (key, ticket);
  END IF;
END $$;
CREATE TABLE IF NOT EXISTS @S@.gone (      -- tombstones of cancelled ids
  id    text COLLATE "C" PRIMARY KEY,
  until timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS @S@.meta (
  one    boolean PRIMARY KEY DEFAULT true CHECK (one),
  layout integer NOT NULL,
  floor  bigint NOT NULL,                  -- the greatest token of all rows that were swept
  swept  timestamptz NOT NULL
);
CREATE UNLOGGED TABLE IF NOT EXISTS @S@.alive (  -- empty after a crash, and on a promoted standby
  one  boolean PRIMARY KEY DEFAULT true CHECK (one),
  boot text NOT NULL
);
INSERT INTO @S@.meta VALUES (true, 1, 0, clock_timestamp()) ON CONFLICT DO NOTHING;
