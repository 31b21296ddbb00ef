-- The steps of the lock. Each step is one function, one message and one commit. @S@ stands for the schema. The search
-- path of each step is pg_catalog, because another schema in the role's path may contain functions of the same names,
-- for example another clock_timestamp().
-- Return the microseconds of the server's clock. No step uses now(), which is the start of the transaction.
CREATE OR REPLACE FUNCTION @S@.us_1() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint $$;

-- Return the token of the next grant of a name. p_last is the token in the row of the name, which the caller has locked.
-- The row may be new: then its last token may be meta.floor, which is beyond the clock if that was stepped back.
CREATE OR REPLACE FUNCTION @S@.token_1(p_last bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  RETURN greatest(p_last + 1, @S@.us_1(), (SELECT m.floor + 1 FROM @S@.meta m));
END $$;

-- far_1, latest_1 and sure_1 cost no call, because the planner inlines them: each is one expression without SET.
-- Return whether a lease of p_ttl that ends at p_until ends so late that the clock must have been stepped back.
CREATE OR REPLACE FUNCTION @S@.far_1(p_until timestamptz, p_ttl bigint, p_now timestamptz) RETURNS boolean LANGUAGE sql STABLE AS
$$ SELECT p_until > p_now + (p_ttl + 1000) * interval '1 ms' $$;

-- Return the greatest value that a handover or a renewal may write into locks.sure.
CREATE OR REPLACE FUNCTION @S@.latest_1() RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT pg_catalog.clock_timestamp() + interval '15 s' $$;

-- Return locks.sure of a lease that is extended by p_ttl. It may be a late renewal, and a crash may have lost a handover
-- that the row covers. So the former value p_sure remains if it is later.
CREATE OR REPLACE FUNCTION @S@.sure_1(p_sure timestamptz, p_ttl bigint) RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT greatest(pg_catalog.clock_timestamp() + p_ttl * interval '1 ms',
     CASE WHEN p_sure IS NOT NULL THEN least(p_sure, @S@.latest_1()) END) $$;

-- Notify the client of this claim, so that it asks again.
CREATE OR REPLACE FUNCTION @S@.wake_1(p_id text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF p_id NOT LIKE '#%' THEN
    PERFORM pg_notify('multilock_' || left(p_id, 16), p_id);
  END IF;
END $$;

-- Check and set what every step needs.
CREATE OR REPLACE FUNCTION @S@.begin_1(p_within integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'multilock needs READ COMMITTED' USING ERRCODE = 'ML002';
  END IF;
  IF current_setting('transaction_read_only') = 'on' THEN  -- a standby may lag behind
    RAISE EXCEPTION 'this server, or this session, is read-only' USING ERRCODE = '25006';
  END IF;
  PERFORM set_config('lock_timeout', p_within::text, true);
  PERFORM set_config('row_security', 'off', true);  -- a policy that hides rows makes an error then, not two holders
  IF current_setting('synchronous_commit') IN ('off', 'local') THEN  -- a grant must outlive a crash and a failover
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  IF current_setting('client_min_messages') = 'error' THEN  -- a warning says that no standby has confirmed the commit
    PERFORM set_config('client_min_messages', 'warning', true);
  END IF;
END $$;

-- Return the random word of this life of the server. A crash and a promotion erase it.
CREATE OR REPLACE FUNCTION @S@.boot_1() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  word text;
BEGIN
  SELECT a.boot INTO word FROM @S@.alive a;
  IF NOT FOUND THEN
    INSERT INTO @S@.alive (boot) VALUES (gen_random_uuid()) ON CONFLICT DO NOTHING;
    SELECT a.boot INTO word FROM @S@.alive a;
  END IF;
  RETURN word;
END $$;

-- Return whether a claim of mode p_want may hold the name: together with holders of mode p_have ('#r', '#p<n>'), or
-- because nobody holds it now. The caller has locked the row of the name. This deletes leases that have ended, except
-- those that an open transaction of the holder guards. If the clock was stepped back, it first cuts each lease to its
-- ttl: a holder that has died would keep the name for too long. It never waits.
CREATE OR REPLACE FUNCTION @S@.room_1(p_key text, p_have text, p_want text) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
DECLARE
  n bigint := 1;
BEGIN
  IF p_have = '#' || p_want THEN
    IF p_want = 'r' THEN
      RETURN true;
    END IF;
    n := substr(p_want, 2)::bigint;
    IF (SELECT count(*) FROM @S@.holders h WHERE h.key = p_key) < n THEN
      RETURN true;
    END IF;
  END IF;
  UPDATE @S@.holders h SET until = clock_timestamp() + h.ttl * interval '1 ms' WHERE h.id IN (
    SELECT o.id FROM @S@.holders o WHERE o.key = p_key AND @S@.far_1(o.until, o.ttl, clock_timestamp())
    FOR NO KEY UPDATE SKIP LOCKED);
  IF p_have <> '#' || p_want AND EXISTS (SELECT FROM @S@.holders h WHERE h.key = p_key AND h.until > clock_timestamp()) THEN
    RETURN false;
  END IF;
  DELETE FROM @S@.holders h WHERE h.id IN (
    SELECT o.id FROM @S@.holders o WHERE o.key = p_key AND o.until <= clock_timestamp() FOR UPDATE SKIP LOCKED);
  RETURN (SELECT count(*) FROM @S@.holders h WHERE h.key = p_key) < n;
END $$;

-- Hand the name to its waiters, in order of arrival, as long as they are alive, listen and fit. The caller has locked
-- the row of p_key. p_have is NULL if the name may go to any waiter, and '#r' or '#p<n>' if it is shared. p_sure is
-- locks.sure of the former holder.
-- The waiter uses the push as its grant, so the handover must outlive a crash. Either the commit is synchronous
-- (flush), or the row that an earlier handover has put on the disk keeps all claims out until the grant in the push
-- has ended (sure, boot).
-- heir is p_me if that claim is next and fits, and '' if it is next and does not fit. heir is NULL if no waiter comes
-- before a newcomer, and otherwise a claim that comes before it. have is the new value of p_have, or 'x' if a claim
-- holds the name alone.
CREATE OR REPLACE FUNCTION @S@.pass_1(p_key text, p_me text, p_have text, p_sure timestamptz,
  OUT heir text, OUT have text, OUT flush boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
  w @S@.queue%ROWTYPE;
  skipped integer := 0;
  client bigint;
  given integer := 0;
  fits boolean;
  ends timestamptz;
  covered boolean;
  t bigint;
BEGIN
  have := p_have;
  flush := false;
  FOR w IN SELECT * FROM @S@.queue q WHERE q.key = p_key ORDER BY q.ticket LOOP
    IF w.id IS DISTINCT FROM p_me THEN
      -- No request keeps a place for more than 6 s. A place beyond that is of a waiter that has not asked since the
      -- clock was stepped back, and that may have died.
      DELETE FROM @S@.queue q WHERE q.id = w.id
        AND (q.until <= clock_timestamp() OR q.until > clock_timestamp() + interval '7 s');
      CONTINUE WHEN FOUND;
      IF w.listens AND skipped < 16 THEN
        -- The lock is given back in the same expression. A transaction that kept it would look like the process of this
        -- waiter to another release, and would delay a listener that connects again.
        client := ('x' || left(w.id, 16))::bit(64)::bigint;
        IF pg_try_advisory_lock(client) AND pg_advisory_unlock(client) THEN
          skipped := skipped + 1;  -- its process has ended, or reconnects, so the waiter keeps its place
          CONTINUE;
        END IF;
      END IF;
    END IF;
    fits := have IS NULL OR @S@.room_1(p_key, have, w.mode);
    IF fits AND have <> '#' || w.mode THEN
      have := NULL;
    END IF;
    IF NOT fits OR w.id = p_me THEN
      heir := CASE WHEN fits THEN p_me ELSE w.id END;
      IF heir = p_me AND NOT fits THEN
        heir := '';
      END IF;
      RETURN;
    END IF;
    IF given >= 256 THEN  -- the request of this waiter hands the name to the next waiters
      PERFORM @S@.wake_1(w.id);
      heir := w.id;
      RETURN;
    END IF;
    DELETE FROM @S@.queue q WHERE q.id = w.id RETURNING * INTO w;  -- until and echo now come from one request
    CONTINUE WHEN NOT FOUND;  -- the waiter has left
    ends := least(w.until, clock_timestamp() + interval '6 s');
    covered := w.echo IS NULL OR coalesce(ends <= p_sure, false);  -- without an echo the push is only a hint
    IF w.mode = 'x' THEN
      -- A row that is not flushed is not on the disk, so it covers nothing that the row before it does not cover.
      UPDATE @S@.locks l SET id = w.id, who = w.who, until = ends, ttl = 6000, token = @S@.token_1(l.token),
        sure = CASE WHEN NOT covered OR p_sure > @S@.latest_1() THEN @S@.latest_1() ELSE p_sure END,
        boot = @S@.boot_1()
        WHERE l.key = p_key RETURNING l.token INTO t;
      have := 'x';
    ELSE
      UPDATE @S@.locks l SET id = '#' || w.mode, who = NULL, until = NULL, ttl = 0, sure = NULL,
        token = @S@.token_1(l.token) WHERE l.key = p_key RETURNING l.token INTO t;
      INSERT INTO @S@.holders (id, key, who, token, ttl, until) VALUES (w.id, p_key, w.who, t, 6000, ends);
      have := '#' || w.mode;
      given := given + 1;
    END IF;
    -- A token beyond the clock, which was stepped back, must be on the disk. After a crash it would be given twice.
    flush := flush OR NOT covered OR t > @S@.us_1();
    PERFORM pg_notify('multilock_' || left(w.id, 16), concat_ws(' ', w.id, w.echo, CASE WHEN w.echo IS NOT NULL THEN t END));
    IF have = 'x' THEN
      heir := w.id;
      RETURN;
    END IF;
  END LOOP;
END $$;

-- Take the name, or take and keep a place in the queue. The first call, a heartbeat and a repeated request follow one
-- rule. token is set if the claim holds the name. Otherwise left_ms is the time until the holder's lease ends, and rank
-- counts the waiters before this one (-1 if it does not wait). left_ms is -2 if the claim was cancelled before. It is
-- -3 if the name is held with a different number of permits, which rank then contains.
CREATE OR REPLACE FUNCTION @S@.acquire_1(
  p_key text, p_id text, p_who text, p_mode text, p_ttl bigint, p_wait bigint, p_barge boolean, p_listens boolean,
  p_echo text, p_within integer, OUT token bigint, OUT left_ms bigint, OUT rank integer) LANGUAGE plpgsql
SET search_path = pg_catalog SET enable_seqscan = off SET jit = off AS $$
DECLARE
  r @S@.locks%ROWTYPE;
  now timestamptz := clock_timestamp();
  ends timestamptz;   -- no claim can enter before this time
  heir text;
  have text;
  flush boolean := false;
  dead boolean;
  queued boolean;
  floor_ bigint := 0;
  old text;
  mine bigint;
  free boolean;
  shared boolean;
  shut boolean := false;
BEGIN
  PERFORM @S@.begin_1(p_within);
  rank := -1;
  SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key;

  IF r.id = p_id THEN  -- a repeated request, or the first one after a handover
    UPDATE @S@.locks l SET until = clock_timestamp() + p_ttl * interval '1 ms', ttl = p_ttl,
      sure = @S@.sure_1(l.sure, p_ttl) WHERE l.key = p_key AND l.id = p_id RETURNING l.token INTO token;
    IF FOUND THEN
      RETURN;
    END IF;
  ELSIF r.until > now AND NOT @S@.far_1(r.until, r.ttl, now) THEN  -- another claim holds it alone
    ends := r.until;
  ELSIF r.until IS NULL AND r.id IS NOT NULL THEN  -- shared
    IF r.id = '#' || p_mode THEN
      UPDATE @S@.holders h SET until = clock_timestamp() + p_ttl * interval '1 ms', ttl = p_ttl
        WHERE h.id = p_id RETURNING h.token INTO token;
      IF FOUND THEN
        RETURN;
      END IF;
      IF p_mode <> 'r' THEN
        SELECT min(s.until) INTO ends
          FROM (SELECT h.until, @S@.far_1(h.until, h.ttl, now) AS far FROM @S@.holders h WHERE h.key = p_key) s
          HAVING count(*) FILTER (WHERE s.until > now) >= substr(p_mode, 2)::bigint AND NOT bool_or(s.far);
      END IF;
    ELSE
      SELECT max(h.until) INTO ends FROM @S@.holders h WHERE h.key = p_key
        HAVING NOT bool_or(@S@.far_1(h.until, h.ttl, now));
      IF ends > now AND r.id LIKE '#p%' AND p_mode LIKE 'p%' THEN
        DELETE FROM @S@.queue q WHERE q.id = p_id;
        left_ms := -3;
        rank := substr(r.id, 3)::integer;
        RETURN;
      END IF;
    END IF;
  END IF;
  IF ends > now THEN  -- this needs no lock on the row of the name
    left_ms := ceil(extract(epoch FROM ends - now) * 1000);
    IF p_wait = 0 THEN
      RETURN;
    END IF;
    UPDATE @S@.queue q SET until = clock_timestamp() + p_wait * interval '1 ms', echo = p_echo, listens = p_listens
      WHERE q.id = p_id RETURNING q.ticket INTO mine;
    IF FOUND THEN
      PERFORM set_config('synchronous_commit', 'off', true);
      SELECT count(*) INTO rank FROM (SELECT FROM @S@.queue q WHERE q.key = p_key AND q.ticket < mine LIMIT 3) s;
      RETURN;
    END IF;
    left_ms := NULL;
  END IF;

  -- Take the name first. Then check that this was right, while no other transaction can change the rows of this name.
  -- The INSERT may wait for a row that is granted, and then deleted by an operator. So it grants no token.
  IF r.key IS NULL THEN
    INSERT INTO @S@.locks (key, token) VALUES (p_key, @S@.us_1()) ON CONFLICT (key) DO NOTHING;
  END IF;
  IF p_mode = 'x' AND r.id IS NULL THEN
    UPDATE @S@.locks l SET id = p_id, who = p_who, ttl = p_ttl, until = clock_timestamp() + p_ttl * interval '1 ms',
      sure = clock_timestamp() + p_ttl * interval '1 ms', boot = @S@.boot_1(), token = greatest(l.token + 1, @S@.us_1())
      WHERE l.key = p_key AND l.id IS NULL RETURNING l.token, l.followed INTO token, r.followed;
    IF token IS NOT NULL THEN
      SELECT m.floor, EXISTS (SELECT FROM @S@.gone g WHERE g.id = p_id),
             EXISTS (SELECT FROM @S@.queue q WHERE q.key = p_key)
        INTO floor_, dead, queued FROM @S@.meta m WHERE m.one;
      IF token > floor_ AND NOT dead AND (p_barge OR NOT queued) THEN
        IF queued THEN  -- this claim may have joined the queue before this request was executed
          DELETE FROM @S@.queue q WHERE q.id = p_id;
        END IF;
        IF r.followed > now THEN
          PERFORM pg_notify('multilock_changes', p_key);
        END IF;
        RETURN;
      END IF;
      UPDATE @S@.locks l SET id = NULL, who = NULL, until = NULL WHERE l.key = p_key;
      token := NULL;
    END IF;
  END IF;

  -- NO KEY UPDATE does not wait for guards. It waits for a release, a take-over, or a join.
  SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key FOR NO KEY UPDATE;
  IF NOT FOUND THEN  -- it was deleted just now, so the name is free
    SELECT a.token, a.left_ms, a.rank INTO token, left_ms, rank
      FROM @S@.acquire_1(p_key, p_id, p_who, p_mode, p_ttl, p_wait, p_barge, p_listens, p_echo, p_within) a;
    RETURN;
  END IF;
  now := clock_timestamp();
  free := r.id IS NULL;
  shared := NOT free AND r.until IS NULL;
  IF r.id = p_id THEN
    UPDATE @S@.locks l SET until = now + p_ttl * interval '1 ms', ttl = p_ttl, sure = @S@.sure_1(l.sure, p_ttl)
      WHERE l.key = p_key RETURNING l.token INTO token;
    RETURN;
  ELSIF shared AND p_mode <> 'x' THEN
    -- A release locks the row of the holder before the row of the name. To wait for it here would be a deadlock.
    PERFORM FROM @S@.holders h WHERE h.id = p_id FOR NO KEY UPDATE NOWAIT;
    UPDATE @S@.holders h SET until = now + p_ttl * interval '1 ms', ttl = p_ttl WHERE h.id = p_id RETURNING h.token INTO token;
    IF FOUND THEN
      RETURN;
    END IF;
  ELSIF NOT free AND NOT shared AND r.until <= now THEN
    -- An open transaction of the holder may guard a lease that has ended. Then the name is still held.
    PERFORM FROM @S@.locks l WHERE l.key = p_key FOR UPDATE SKIP LOCKED;
    -- If a guard has ended between our two locks, xmax is a list of all three. Then the row would admit another guard of
    -- the holder whose transaction sees an older version of the row. So the next request takes the name, not this one.
    free := FOUND AND (SELECT l.xmax = pg_current_xact_id()::xid FROM @S@.locks l WHERE l.key = p_key);
    IF r.sure > now AND NOT EXISTS (SELECT FROM @S@.alive a WHERE a.boot = r.boot) THEN  -- a later handover may be lost
      free := false;
      shut := true;
      r.until := r.sure;
    END IF;
  END IF;
  old := r.id;
  IF EXISTS (SELECT FROM @S@.gone g WHERE g.id = p_id) THEN
    left_ms := -2;
    RETURN;
  END IF;
  IF free OR shared THEN
    have := CASE WHEN shared THEN r.id END;
    IF NOT (p_barge AND free) THEN
      SELECT * INTO heir, have, flush FROM @S@.pass_1(p_key, p_id, have, NULL);
    END IF;
    IF (heir IS NULL OR heir = p_id) AND (have IS NULL OR @S@.room_1(p_key, have, p_mode)) THEN
      IF heir = p_id OR p_barge THEN  -- otherwise its own release would hand the name to this claim again
        DELETE FROM @S@.queue q WHERE q.id = p_id;
      END IF;
      IF p_mode = 'x' THEN
        UPDATE @S@.locks l SET id = p_id, who = p_who, ttl = p_ttl, until = clock_timestamp() + p_ttl * interval '1 ms',
          sure = clock_timestamp() + p_ttl * interval '1 ms', boot = @S@.boot_1(), token = @S@.token_1(l.token)
          WHERE l.key = p_key RETURNING l.token INTO token;
      ELSE
        UPDATE @S@.locks l SET id = '#' || p_mode, who = NULL, ttl = 0, until = NULL, sure = NULL,
          token = @S@.token_1(l.token) WHERE l.key = p_key RETURNING l.token INTO token;
        INSERT INTO @S@.holders (id, key, who, token, ttl, until)
          VALUES (p_id, p_key, p_who, token, p_ttl, clock_timestamp() + p_ttl * interval '1 ms');
        IF heir = p_id THEN  -- the waiters behind this claim may fit too
          PERFORM @S@.pass_1(p_key, NULL, '#' || p_mode, NULL);
        END IF;
      END IF;
      IF r.followed > now AND old IS DISTINCT FROM '#' || p_mode THEN
        PERFORM pg_notify('multilock_changes', p_key);
      END IF;
      IF old IS NOT NULL THEN
        PERFORM @S@.wake_1(old);
      END IF;
      RETURN;
    END IF;
    SELECT l.id, l.until INTO r.id, r.until FROM @S@.locks l WHERE l.key = p_key;
    IF r.followed > now AND old IS DISTINCT FROM r.id THEN
      PERFORM pg_notify('multilock_changes', p_key);
    END IF;
    IF r.until IS NULL THEN
      IF r.id LIKE '#p%' AND p_mode LIKE 'p%' AND r.id <> '#' || p_mode THEN
        DELETE FROM @S@.queue q WHERE q.id = p_id;
        left_ms := -3;
        rank := substr(r.id, 3)::integer;
        RETURN;
      END IF;
      SELECT CASE WHEN r.id <> '#' || p_mode THEN max(h.until) WHEN p_mode <> 'r' THEN min(h.until) END
        INTO r.until FROM @S@.holders h WHERE h.key = p_key;
    END IF;
  ELSIF NOT shut AND @S@.far_1(r.until, r.ttl, now) THEN  -- the clock was stepped back
    -- After a crash a handover may be lost that this row covered, and its waiter believes for 6 s at most.
    UPDATE @S@.locks l SET until = now + r.ttl * interval '1 ms',
      sure = CASE WHEN l.sure > now + interval '6 s' THEN now + interval '6 s' ELSE l.sure END WHERE l.key = p_key RETURNING l.until INTO r.until;
  END IF;
  left_ms := greatest(0, ceil(extract(epoch FROM r.until - now) * 1000));
  IF p_wait > 0 THEN
    INSERT INTO @S@.queue AS q (key, id, who, mode, until, echo, listens)
      VALUES (p_key, p_id, p_who, p_mode, clock_timestamp() + p_wait * interval '1 ms', p_echo, p_listens)
      ON CONFLICT (id) DO UPDATE SET until = excluded.until, echo = excluded.echo, listens = excluded.listens RETURNING q.ticket INTO mine;
    SELECT count(*) INTO rank FROM (SELECT FROM @S@.queue q WHERE q.key = p_key AND q.ticket < mine LIMIT 3) s;
  END IF;
  IF NOT flush THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
END $$;

-- Release the name, or leave the queue. p_unsure is true if a request of this id had no reply: then the cancel is final.
-- Returns true if the claim held the name until this release began.
CREATE OR REPLACE FUNCTION @S@.release_1(p_key text, p_id text, p_unsure boolean, p_within integer)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog SET enable_seqscan = off SET jit = off AS $$
DECLARE
  r @S@.locks%ROWTYPE;
  began timestamptz := clock_timestamp();  -- a lease that ends while this waits for a guard was ours until the release
  ends timestamptz;
  alone boolean;
  known boolean;  -- the row was granted since the server's last crash or promotion
  ours boolean;
  have text;
  flush boolean := false;
BEGIN
  PERFORM @S@.begin_1(p_within);
  IF p_unsure THEN  -- waits for a request that is making this row
    INSERT INTO @S@.locks (key, token) VALUES (p_key, @S@.us_1()) ON CONFLICT (key) DO NOTHING;
    INSERT INTO @S@.gone VALUES (p_id, clock_timestamp() + interval '1 hour') ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  END IF;
  SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key AND l.id = p_id FOR UPDATE;  -- waits for guards
  alone := FOUND;
  IF NOT alone THEN
    PERFORM FROM @S@.holders h WHERE h.id = p_id FOR UPDATE;  -- waits for guards, so this comes before the row of the name
    SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key FOR NO KEY UPDATE;
    IF r.id = p_id THEN  -- it was handed over meanwhile
      SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key FOR UPDATE;
      alone := true;
    END IF;
  END IF;
  known := EXISTS (SELECT FROM @S@.alive a WHERE a.boot = r.boot);
  IF alone AND p_unsure AND r.sure > clock_timestamp() AND NOT known THEN
    -- An earlier execution of this release may be lost in a crash, with a handover that this row covered. So the name
    -- rests until its waiter no longer believes.
    RETURN @S@.rest_1(p_key, p_id, true, ceil(extract(epoch FROM least(r.sure - clock_timestamp(), interval '6 s')) * 1000)::bigint, p_within);
  END IF;
  IF alone THEN
    ours := r.until > began;
  ELSE
    DELETE FROM @S@.queue q WHERE q.id = p_id;
    DELETE FROM @S@.holders h WHERE h.id = p_id RETURNING h.until INTO ends;
    ours := coalesce(ends > began, false);
    have := r.id;
  END IF;
  -- A waiter that left may have made room too, so hand the name to the waiters that fit now. If an operator has deleted
  -- the row, they ask by themselves.
  IF alone OR r.until IS NULL AND r.key IS NOT NULL THEN
    IF EXISTS (SELECT FROM @S@.queue q WHERE q.key = p_key) THEN
      -- After a crash or a restart the server shows commits that wait for a synchronous standby. So a lease that was
      -- granted or renewed before covers no handover.
      SELECT p.have, p.flush INTO have, flush FROM @S@.pass_1(p_key, NULL, have,
        CASE WHEN alone AND known AND r.until - r.ttl * interval '1 ms' > pg_postmaster_start_time() THEN r.sure END) p;
    END IF;
    IF have IS NULL AND r.id IS NOT NULL
       OR have LIKE '#%' AND NOT EXISTS (SELECT FROM @S@.holders h WHERE h.key = p_key) THEN
      UPDATE @S@.locks l SET id = NULL, who = NULL, until = NULL, sure = NULL WHERE l.key = p_key;
      have := NULL;
    END IF;
    IF r.followed > clock_timestamp() AND (alone OR have IS DISTINCT FROM r.id) THEN
      PERFORM pg_notify('multilock_changes', p_key);
    END IF;
  END IF;
  IF NOT p_unsure AND NOT flush THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  RETURN ours;
END $$;

-- Release, but keep the name taken for p_ms from now, by an id that no client can renew.
CREATE OR REPLACE FUNCTION @S@.rest_1(p_key text, p_id text, p_unsure boolean, p_ms bigint, p_within integer)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog SET enable_seqscan = off SET jit = off AS $$
DECLARE
  began timestamptz := clock_timestamp();  -- as in release_1
  until_ timestamptz;
  followed_ timestamptz;
  id_ text;
  nobody text := '#rest.' || p_id;
BEGIN
  PERFORM @S@.begin_1(p_within);
  IF p_unsure THEN
    INSERT INTO @S@.gone VALUES (p_id, clock_timestamp() + interval '1 hour') ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  END IF;
  SELECT l.id, l.until, l.followed INTO id_, until_, followed_ FROM @S@.locks l WHERE l.key = p_key AND l.id IN (p_id, nobody) FOR UPDATE;
  IF FOUND THEN
    UPDATE @S@.locks l SET id = nobody, ttl = p_ms, sure = NULL,
      until = CASE WHEN l.id = p_id THEN clock_timestamp() + p_ms * interval '1 ms' ELSE least(l.until, clock_timestamp() + p_ms * interval '1 ms') END
      WHERE l.key = p_key;
  ELSE
    SELECT h.id, h.until INTO id_, until_ FROM @S@.holders h WHERE h.id IN (p_id, nobody) FOR UPDATE;
    IF NOT FOUND THEN
      RETURN @S@.release_1(p_key, p_id, p_unsure, p_within);
    END IF;
    UPDATE @S@.holders h SET id = nobody, ttl = p_ms,
      until = CASE WHEN h.id = p_id THEN clock_timestamp() + p_ms * interval '1 ms' ELSE least(h.until, clock_timestamp() + p_ms * interval '1 ms') END
      WHERE h.id = id_;
  END IF;
  IF id_ = p_id THEN  -- the first waiters look when the name will be free
    PERFORM @S@.wake_1(s.id) FROM (SELECT q.id FROM @S@.queue q WHERE q.key = p_key ORDER BY q.ticket LIMIT 3) s;
    IF followed_ > clock_timestamp() THEN
      PERFORM pg_notify('multilock_changes', p_key);
    END IF;
  END IF;
  RETURN until_ > began;
END $$;

-- Take the name from all holders, also if it rests. Returns the ids of the holders whose leases had not ended. A request
-- of a former holder that is still on its way does not take the name again: its lease would count as held, and keep its
-- old token.
CREATE OR REPLACE FUNCTION @S@.force_1(p_key text, p_within integer) RETURNS text[] LANGUAGE plpgsql
SET search_path = pg_catalog SET enable_seqscan = off SET jit = off AS $$
DECLARE
  r @S@.locks%ROWTYPE;
  ended text[] := '{}';
  live text[];
BEGIN
  PERFORM @S@.begin_1(p_within);
  PERFORM FROM @S@.holders h WHERE h.key = p_key ORDER BY h.id FOR UPDATE;  -- waits for guards, before the row of the name
  SELECT * INTO r FROM @S@.locks l WHERE l.key = p_key FOR UPDATE;          -- waits for guards
  IF r.id IS NULL THEN
    RETURN '{}';
  END IF;
  IF r.until IS NULL THEN
    WITH d AS (DELETE FROM @S@.holders h WHERE h.key = p_key RETURNING h.id, h.until)
    SELECT array_agg(d.id), array_agg(d.id) FILTER (WHERE d.until > clock_timestamp()) INTO ended, live FROM d;
  ELSE
    ended := ARRAY[r.id];
    live := CASE WHEN r.until > clock_timestamp() THEN ended END;
  END IF;
  IF (SELECT p.have IS NULL FROM @S@.pass_1(p_key, NULL, NULL, NULL) p) THEN
    UPDATE @S@.locks l SET id = NULL, who = NULL, until = NULL, sure = NULL WHERE l.key = p_key;
  END IF;
  INSERT INTO @S@.gone SELECT e, clock_timestamp() + interval '1 hour' FROM unnest(ended) e WHERE e NOT LIKE '#%'
    ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  PERFORM @S@.wake_1(e) FROM unnest(ended) e;
  IF r.followed > clock_timestamp() THEN
    PERFORM pg_notify('multilock_changes', p_key);
  END IF;
  RETURN coalesce(live, '{}');
END $$;

-- Extend leases. Returns the ids that no longer hold their names. An id that another transaction keeps from being
-- extended is returned with a '?' before it: one locked row must not cost the client its other leases.
-- Without force_generic_plan the server would plan each renewal anew, which takes longer than the renewal. It expects ten
-- elements in an unknown array, so a plan for one known element seems better to it.
CREATE OR REPLACE FUNCTION @S@.renew_1(p_keys text[], p_ids text[], p_ttls bigint[], p_within integer)
RETURNS text[] LANGUAGE plpgsql
SET search_path = pg_catalog SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
  n integer := cardinality(p_ids);
  lost text[];
  ttls bigint[];
BEGIN
  PERFORM @S@.begin_1(CASE WHEN n > 1 THEN greatest(1, p_within / 2) ELSE p_within END);
  WITH asked AS (SELECT * FROM unnest(p_keys, p_ids, p_ttls) AS a(key, id, ttl)),
       done AS (UPDATE @S@.locks l SET until = clock_timestamp() + a.ttl * interval '1 ms', ttl = a.ttl,
                  sure = @S@.sure_1(l.sure, a.ttl)
                FROM asked a WHERE l.key = a.key AND l.id = a.id RETURNING l.id)
  SELECT array_agg(a.id), array_agg(a.ttl) INTO lost, ttls FROM asked a WHERE a.id NOT IN (SELECT id FROM done);
  IF lost IS NOT NULL THEN  -- readers and permits
    WITH asked AS (SELECT * FROM unnest(lost, ttls) AS a(id, ttl)),
         done AS (UPDATE @S@.holders h SET until = clock_timestamp() + a.ttl * interval '1 ms', ttl = a.ttl
                  FROM asked a WHERE h.id = a.id RETURNING h.id)
    SELECT array(SELECT a.id FROM asked a WHERE a.id NOT IN (SELECT id FROM done)) INTO lost;
  END IF;
  RETURN coalesce(lost, '{}');
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  lost := '{}';
  IF n = 1 THEN
    RETURN ARRAY['?' || p_ids[1]];
  END IF;
  FOR i IN 1..n LOOP
    lost := lost || @S@.renew_1(p_keys[i:i], p_ids[i:i], p_ttls[i:i], 1);
  END LOOP;
  RETURN lost;
END $$;

-- Delete the rows of names that nobody holds, waits for or follows, once a minute for all clients together.
CREATE OR REPLACE FUNCTION @S@.sweep_1(p_age interval DEFAULT '60 s') RETURNS integer LANGUAGE plpgsql SET search_path = pg_catalog SET jit = off AS $$
DECLARE
  n integer;
  s record;
BEGIN
  PERFORM @S@.begin_1(1000);
  PERFORM FROM @S@.meta m WHERE m.swept < clock_timestamp() - p_age OR m.swept > clock_timestamp() FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN -1;
  END IF;
  WITH old AS (
    SELECT l.key FROM @S@.locks l
    WHERE (l.id IS NULL OR l.until < clock_timestamp() - p_age) AND l.token < @S@.us_1() - extract(epoch FROM p_age) * 1000000
      AND (l.followed IS NULL OR l.followed < clock_timestamp())
      AND NOT EXISTS (SELECT FROM @S@.queue q WHERE q.key = l.key)
    LIMIT 100000 FOR UPDATE SKIP LOCKED),
  swept AS (DELETE FROM @S@.locks l USING old WHERE l.key = old.key RETURNING 1)
  SELECT count(*) INTO n FROM swept;
  -- If the clock was stepped back, a reader that has died would keep writers out for too long.
  UPDATE @S@.holders h SET until = clock_timestamp() + h.ttl * interval '1 ms' WHERE h.id IN (
    SELECT o.id FROM @S@.holders o WHERE @S@.far_1(o.until, o.ttl, clock_timestamp())
    LIMIT 10000 FOR NO KEY UPDATE SKIP LOCKED);
  -- Shared names whose leases are all over become free. A later sweep deletes their rows.
  FOR s IN SELECT l.key, l.id FROM @S@.locks l WHERE l.until IS NULL AND l.id IS NOT NULL
      AND NOT EXISTS (SELECT FROM @S@.holders h WHERE h.key = l.key AND h.until > clock_timestamp() - p_age)
      LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED LOOP
    IF @S@.room_1(s.key, s.id, 'x') THEN
      UPDATE @S@.locks l SET id = NULL WHERE l.key = s.key;
    END IF;
  END LOOP;
  DELETE FROM @S@.queue q WHERE q.until < clock_timestamp() - p_age;
  DELETE FROM @S@.gone g WHERE g.until < clock_timestamp();
  UPDATE @S@.meta m SET swept = clock_timestamp();
  RETURN n;
END $$;

-- Keep the name for its holder until the end of the caller's own transaction. Raises ML001, which ends that transaction,
-- if the name is no longer held with this token. In REPEATABLE READ and SERIALIZABLE, a transaction that began before
-- the grant may not see the grant. Then this raises a serialization failure, because a new transaction can see it.
CREATE OR REPLACE FUNCTION @S@.guard_1(p_key text, p_token bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog SET enable_seqscan = off SET jit = off AS $$
BEGIN
  PERFORM FROM @S@.locks l WHERE l.key = p_key AND l.token = p_token AND l.until IS NOT NULL AND l.id NOT LIKE '#%' FOR KEY SHARE;
  IF NOT FOUND THEN
    PERFORM FROM @S@.holders h WHERE h.key = p_key AND h.token = p_token AND h.id NOT LIKE '#%' FOR KEY SHARE;
    IF NOT FOUND THEN
      IF current_setting('transaction_isolation') <> 'read committed'
          AND p_token BETWEEN extract(epoch FROM now()) * 1000000 AND @S@.us_1() THEN
        RAISE EXCEPTION 'could not serialize access: this transaction began before the lock % was acquired', p_key
          USING ERRCODE = '40001';
      END IF;
      RAISE EXCEPTION 'the lock % is no longer held with the token %', p_key, p_token USING ERRCODE = 'ML001';
    END IF;
  END IF;
  -- VACUUM FULL and CLUSTER write old rows anew, without the mark that their holdings have ended. The caller may have a
  -- temporary table of the name pg_class.
  IF current_setting('transaction_isolation') <> 'read committed' AND EXISTS (SELECT FROM pg_catalog.pg_class c
      WHERE c.oid IN ('@S@.locks'::pg_catalog.regclass, '@S@.holders'::pg_catalog.regclass)
      AND c.relfilenode <> pg_relation_filenode(c.oid)) THEN
    RAISE EXCEPTION 'could not serialize access: the tables of the locks were rewritten since this transaction began'
      USING ERRCODE = '40001';
  END IF;
END $$;

-- Notify the holders of a row that an operator deletes.
CREATE OR REPLACE FUNCTION @S@.deleted_1() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
  gone text;
BEGIN
  PERFORM @S@.wake_1(OLD.id);
  IF OLD.until IS NULL THEN
    FOR gone IN DELETE FROM @S@.holders h WHERE h.key = OLD.key RETURNING h.id LOOP
      PERFORM @S@.wake_1(gone);
    END LOOP;
  END IF;
  IF OLD.followed > clock_timestamp() THEN
    PERFORM pg_notify('multilock_changes', OLD.key);
  END IF;
  RETURN NULL;
END $$;

-- Keep the greatest token of all rows that are deleted, by a sweep or by an operator. If the clock is stepped back, the
-- clock alone would give later grants lower tokens.
CREATE OR REPLACE FUNCTION @S@.floor_1() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  UPDATE @S@.meta m SET floor = d.top FROM (SELECT max(o.token) AS top FROM old_rows o) d WHERE m.floor < d.top;
  RETURN NULL;
END $$;
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = '@S@.locks'::regclass AND t.tgname = 'deleted_1') THEN
    CREATE TRIGGER deleted_1 AFTER DELETE ON @S@.locks FOR EACH ROW
      WHEN (OLD.id IS NOT NULL) EXECUTE FUNCTION @S@.deleted_1();
    -- Otherwise a session with session_replication_role = replica would leave the leases of readers and permits alive.
    ALTER TABLE @S@.locks ENABLE ALWAYS TRIGGER deleted_1;
  END IF;
  IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = '@S@.locks'::regclass AND t.tgname = 'floor_1') THEN
    CREATE TRIGGER floor_1 AFTER DELETE ON @S@.locks REFERENCING OLD TABLE AS old_rows
      FOR EACH STATEMENT EXECUTE FUNCTION @S@.floor_1();
    ALTER TABLE @S@.locks ENABLE ALWAYS TRIGGER floor_1;
  END IF;
END $$;
