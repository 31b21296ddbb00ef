// Model of Redlock: what claims know of the servers' votes, and their tokens, on three independent servers.
//
//     redlock_claims <claims> <faults> <restarts> <mistake or -> [most states, in millions]
//                    [kinds of faults: 1 pushes, 2 replies, 4 requests; 7]
//
// A server admits one claim, and stores the greatest stamp that it gave. With each admission it gives ANY greater
// number as the stamp. So the model covers every rule by which a client proposes a number or a clock limits it. A claim
// asks any server at any time, with one request at a time on each server. (A request is sent at the moment of its
// execution, unless it is a fault.) Where a claim has only a minority it may give way. Where it has a majority with
// several stamps, it may have its stamp raised. For each server the claim counts only the newest statement. A push is
// as old as the request whose echo it carries, and comes after that request's reply. A majority of votes with one stamp
// is the lock, and the stamp is its token.
//
// A free server next admits any claim in its queue, or none. A fault is one of these: a push comes late or never; a
// reply is read later than at its execution; nobody waits for the reply of a request. Such a request is executed at any
// later time, or never. A claim that has ended begins again as a new claim, so the number of acquisitions is not
// bounded. The model has no clock: it assumes that a vote expires at its claim before the server's lease ends
// (redlock.cpp shows that). A server that restarted counts again once every vote that it gave before has expired.
// Stamps are compared only by their order.
//
//   I1 at most one claim holds       T  each token is greater than all before
//   I3 a claim that ended neither holds nor waits, and cannot become a holder
//
// `patient` is not a mistake, but has fewer states: a waiter gives up only after a request to give way without a reply.
// A server that lost its data gives a stamp greater than every token before (perfect clocks), unless the mistake says
// otherwise.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

constexpr int LOW = 1;  // a stamp that is lower than the last token
constexpr int N = 3, NEED = 2, MAXC = 3;
enum { NONE, VOTES, YIELDS };                    // place
enum { NOTHING, ASK, GIVE, RAISE };              // requests
enum { OPEN, BUSY, GRANTED };                    // executed, and its result
enum { ACTIVE, HOLDS, LEAVING };
struct At {
  uint8_t place, stamp, gen, push, unsure, old;  // the newest statement: of request gen, by push
  uint8_t kind, kgen, raise, said, sstamp, sstale;  // the request under way
  uint8_t stray, sgen, sraise;                   // a request for whose reply nobody waits
  uint8_t echo;                                  // in the queue: the number of its request; 0: not queued
  uint8_t pgen, pstamp, pstale;                  // push on its way; pstale 1: given before a restart, 2: expired
  uint8_t tell;                                  // a release on its way: 1, 2 with a tombstone
};
struct Server { int8_t holder; uint8_t kept, guard; };
struct State {
  Server s[N]; At a[N][MAXC]; uint8_t phase[MAXC]; uint8_t last, faults, restarts;
};
int C, kinds = 7; std::string M;  // kinds of faults: 1 a late or lost push, 2 a reply, 4 a request
bool is(const char* m) { return M == m; }
bool m_strict, m_max, m_anywhere, m_nofloor, m_stale, m_yield, m_tomb, m_guard, m_acked, m_minority, m_forget, m_oldanswer, m_unsuregive, m_lostgive, m_small;

struct Table {
  std::vector<uint64_t> slot; size_t n = 0;
  Table() : slot(1 << 22) {}
  bool insert(uint64_t h) {
    if (!h) h = 1;
    if (n * 2 > slot.size()) { std::vector<uint64_t> o(slot.size() * 2); o.swap(slot); for (uint64_t x : o) if (x) put(x); }
    return put(h) ? (n++, true) : false;
  }
  bool put(uint64_t h) { size_t i = h & (slot.size() - 1); while (slot[i]) { if (slot[i] == h) return false; i = (i + 1) & (slot.size() - 1); } slot[i] = h; return true; }
} known;
std::deque<State> todo; bool bad; size_t most = 400000000; size_t holds_seen, raised_seen, split_seen;

uint64_t hash(const State& s) {
  const uint8_t* p = (const uint8_t*)&s; uint64_t h = 0x9E3779B97F4A7C15;
  for (size_t i = 0; i < sizeof s; i++) { h = (h ^ p[i]) * 0x100000001b3; if (i % 8 == 7) h ^= h >> 29; }
  h *= 0xff51afd7ed558ccd; h ^= h >> 32; h *= 0xc4ceb9fe1a85ec53; return h ^ h >> 29;
}
template <class F> void stamps(State& s, F f) {
  f(s.last);
  for (int i = 0; i < N; i++) { if (s.s[i].kept != LOW) f(s.s[i].kept); for (int c = 0; c < C; c++) { At& a = s.a[i][c]; f(a.stamp); f(a.raise); f(a.sstamp); f(a.sraise); f(a.pstamp); } }
}
void fail(const State& s, const char* what, int c) {
  if (bad) return;
  bad = true;
  printf("%s, %d claims, %d faults left, %d restarts left: VIOLATION %s by claim %d after %zu states\n", M.c_str(), C, s.faults, s.restarts, what, c, known.n);
  for (int i = 0; i < N; i++) { printf("  server %d holder %d kept %d guard %d:", i, s.s[i].holder, s.s[i].kept, s.s[i].guard);
    for (int k = 0; k < C; k++) { const At& a = s.a[i][k]; printf(" [%d %s stamp %d gen %d%s | req %d said %d | stray %d | echo %d | push %d]", k, a.place == VOTES ? "VOTES" : a.place == YIELDS ? "YIELDS" : "-", a.stamp, a.gen, a.push ? "p" : "", a.kind, a.said, a.stray, a.echo, a.pgen); } puts(""); }
  printf("  last token %d\n", s.last);
}
void tidy(State& s) {
  for (int i = 0; i < N; i++) for (int c = 0; c < C; c++) {
    At& a = s.a[i][c];
    if (a.place != VOTES) a.stamp = a.old = 0;
    if (a.kind != RAISE) a.raise = 0;
    if (!a.kind) a.kgen = a.raise = a.said = a.sstamp = a.sstale = 0;
    if (a.said != GRANTED) a.sstamp = 0;
    if (a.stray != RAISE) a.sraise = 0;
    if (!a.stray) a.sgen = 0;
    if (!m_nofloor && !m_stale && (a.pstale == 2 || a.pgen < a.gen || (a.pgen == a.gen && a.push))) a.pgen = 0;  // it would be dropped
    if (!a.stray) a.unsure = 0;  // a tombstone changes nothing then
    if (!a.pgen) a.pstamp = a.pstale = 0;
    if (s.phase[c] == HOLDS) { a.pgen = a.pstamp = a.pstale = 0; if (a.kind && a.said) { a.kind = 0; a.kgen = a.raise = a.said = a.sstamp = a.sstale = 0; } }
    if (s.phase[c] == LEAVING) { a.place = a.stamp = a.gen = a.push = a.old = a.pgen = a.pstamp = a.pstale = 0; }
    uint8_t g[5] = {a.gen, a.kgen, a.sgen, a.echo, a.pgen}, o[5]; memcpy(o, g, 5);
    std::sort(g, g + 5); int n = std::unique(g, g + 5) - g;
    auto r = [&](uint8_t& x) { int k = std::lower_bound(g, g + n, x) - g; x = x ? (g[0] ? k + 1 : k) : 0; };
    r(a.gen), r(a.kgen), r(a.sgen), r(a.echo), r(a.pgen);
  }
  // Of the kept stamp of a server without a holder, only whether it is below the last token matters, since the server may give any stamp.
  for (int i = 0; i < N; i++) if (s.s[i].kept && (s.s[i].holder < 0 || s.phase[s.s[i].holder] == LEAVING)) s.s[i].kept = s.last && s.s[i].kept >= s.last ? s.last : LOW;
  uint8_t v[64]; int n = 0; stamps(s, [&](uint8_t& x) { if (x) v[n++] = x; });
  std::sort(v, v + n); n = std::unique(v, v + n) - v;
  stamps(s, [&](uint8_t& x) { if (x) x = 2 * (std::lower_bound(v, v + n, x) - v + 2); });
}
void add(State s) {
  if (bad) return;
  tidy(s);
  // servers are alike, and so are claims
  State best; bool first = true; int q[MAXC] = {0, 1, 2};
  do {
    State t = s;
    for (int i = 0; i < N; i++) { for (int c = 0; c < C; c++) t.a[i][c] = s.a[i][q[c]]; if (s.s[i].holder >= 0) for (int c = 0; c < C; c++) if (q[c] == s.s[i].holder) t.s[i].holder = c; }
    for (int c = 0; c < C; c++) t.phase[c] = s.phase[q[c]];
    int o[N] = {0, 1, 2};
    std::sort(o, o + N, [&](int x, int y) { int k = memcmp(&t.s[x], &t.s[y], sizeof t.s[x]); return k ? k < 0 : memcmp(t.a[x], t.a[y], sizeof t.a[x]) < 0; });
    State u = t; for (int i = 0; i < N; i++) u.s[i] = t.s[o[i]], memcpy(u.a[i], t.a[o[i]], sizeof u.a[i]);
    if (first || memcmp(&u, &best, sizeof u) < 0) best = u, first = false;
  } while (std::next_permutation(q, q + C));
  if (known.insert(hash(best))) todo.push_back(best);
}
// Every stamp that a server may give now: any greater than the kept one, compared by order.
template <class F> void fresh(const State& s, int i, F f) {
  int top = s.last, from = s.s[i].kept;
  State& m = const_cast<State&>(s); stamps(m, [&](uint8_t& x) { top = std::max<int>(top, x); });
  if (!from && !m_forget) from = s.last;  // a server that lost its data uses its clock
  top = std::max(top, 3);
  for (int v = std::max(3, from + (m_strict && s.s[i].kept > LOW ? 0 : 1)); v <= top + 1; v++) if (v > 3 || from <= LOW) f(v);
}
void let_in(State& s, int i, int c, int stamp) { s.s[i].holder = c; s.s[i].kept = std::max<int>(s.s[i].kept, stamp); s.a[i][c].echo = 0; }
void heard(State& s, int i, int c) {  // a push
  At& a = s.a[i][c];
  bool newer = a.pgen > a.gen || (a.pgen == a.gen && !a.push);
  if (m_nofloor && a.place != NONE) newer = true;
  if (m_stale && a.place == NONE) newer = true;
  if (s.phase[c] == ACTIVE && newer && a.pstale != 2) a.place = VOTES, a.gen = std::max(a.gen, a.pgen), a.push = 1, a.stamp = a.pstamp, a.old = a.pstale == 1;
  a.pgen = 0;
}
// The server has no holder now: it admits and notifies any waiter, or none.
template <class F> void pass(const State& s, int i, F f) {
  State t = s; t.s[i].holder = -1; f(t);
  for (int c = 0; c < C; c++) if (s.a[i][c].echo) fresh(s, i, [&](int v) {
    State u = s; At& a = u.a[i][c]; a.pgen = a.echo; a.pstamp = v; a.pstale = 0; let_in(u, i, c, v);
    if (s.faults && kinds & 1) { State l = u; l.faults--; f(l); }
    heard(u, i, c); f(u); });
}
// One request is executed: f(state, its result, stamp).
template <class F> void execute(const State& s, int i, int c, int kind, int gen, int raise, F f) {
  if (s.s[i].holder == c) {
    State t = s;
    if (kind == GIVE) {
      State u = s; u.a[i][c].echo = gen;
      pass(u, i, [&](State& w) { if (w.s[i].holder >= 0 && w.s[i].holder != c) f(w, BUSY, 0); });
    }
    if (kind == RAISE && raise > t.s[i].kept) t.s[i].kept = raise;
    f(t, GRANTED, t.s[i].kept);
    return;
  }
  if (m_anywhere && kind == RAISE && raise > s.s[i].kept) { State t = s; t.s[i].kept = raise; f(t, GRANTED, raise); return; }
  if (s.s[i].holder < 0) {
    fresh(s, i, [&](int v) { State t = s; let_in(t, i, c, v); f(t, GRANTED, v); });
    State u = s; u.a[i][c].echo = gen;
    pass(u, i, [&](State& w) { if (w.s[i].holder >= 0 && w.s[i].holder != c) f(w, BUSY, 0); });
    return;
  }
  State t = s; t.a[i][c].echo = gen; f(t, BUSY, 0);
}
// The claim's conclusion from a reply.
void hears(State& s, int i, int c, int gen, int said, int stamp, int stale) {
  At& a = s.a[i][c];
  if (s.phase[c] != ACTIVE) return;
  if (gen < a.gen || (gen == a.gen && a.push)) { if (!m_oldanswer) return; }
  a.gen = gen; a.push = 0;
  a.place = said == GRANTED && stale != 2 ? VOTES : NONE;
  a.stamp = stamp; a.old = stale == 1;
}
bool counts(const State& s, int i) { return !s.s[i].guard || m_guard; }
void look(const State& s) {
  for (int i = 0; i < N && !bad; i++) {
    const Server& sv = s.s[i];
    if (sv.holder >= 0 && s.phase[sv.holder] != LEAVING) {  // the lease ends; its vote has expired before
      if (s.phase[sv.holder] == ACTIVE) pass(s, i, [&](State& t) { At& b = t.a[i][sv.holder]; if (b.place == VOTES && !b.old) b.place = NONE; if (b.kind && b.said) b.sstale = 2; if (b.pgen && t.s[i].holder != sv.holder) b.pstale = 2; add(t); });
    }
    if (sv.guard) {
      bool old = false; for (int c = 0; c < C; c++) old |= s.a[i][c].place == VOTES && s.a[i][c].old;
      bool held = false; for (int c = 0; c < C; c++) held |= s.phase[c] == HOLDS && s.a[i][c].place == VOTES && s.a[i][c].old;
      if (old && !held) { State t = s; for (int c = 0; c < C; c++) if (t.a[i][c].old) t.a[i][c].place = NONE; t.s[i].guard = 0; for (int c = 0; c < C; c++) { At& a = t.a[i][c]; if (a.sstale == 1) a.sstale = 2; if (a.pstale == 1) a.pstale = 2; } add(t); }
      if (!old) { State t = s; t.s[i].guard = 0; for (int c = 0; c < C; c++) { At& a = t.a[i][c]; if (a.sstale == 1) a.sstale = 2; if (a.pstale == 1) a.pstale = 2; } add(t); }
    }
    if (s.restarts) {
      State t = s; t.restarts--; t.s[i] = {-1, 0, 1};
      for (int c = 0; c < C; c++) {
        At& a = t.a[i][c]; a.echo = 0; a.stray = 0; a.tell = 0;
        if (a.place == VOTES) a.old = 1;
        if (a.pgen && !a.pstale) a.pstale = 1;
        if (a.kind && a.said) { if (!a.sstale) a.sstale = 1; }
      }
      add(t);
    }
  }
  for (int c = 0; c < C && !bad; c++) {
    int votes = 0, most_same = 0, token = 0, top = 0; bool touched = false;
    for (int i = 0; i < N; i++) { const At& a = s.a[i][c]; touched |= a.place || a.kind || a.gen || a.echo || s.s[i].holder == c;
      if (((a.place == VOTES) || (m_yield && a.place == YIELDS && 0)) && counts(s, i)) { votes++; top = std::max<int>(top, a.stamp); int same = 0; for (int j = 0; j < N; j++) same += s.a[j][c].place == VOTES && counts(s, j) && s.a[j][c].stamp == a.stamp; if (same > most_same) most_same = same, token = a.stamp; } }
    int need = m_minority ? 1 : NEED;
    if (s.phase[c] == ACTIVE) {
      if (m_max && votes >= NEED) most_same = NEED, token = top;
      if (most_same >= need) {
        for (int d = 0; d < C; d++) if (d != c && s.phase[d] == HOLDS) return fail(s, "I1 two hold", c);
        if (s.last && token <= s.last) return fail(s, "T a token is not greater", c);
        holds_seen++;
        State t = s; t.phase[c] = HOLDS; t.last = token; add(t);
      }
      if (votes >= NEED && most_same < NEED) split_seen++;
    }
    bool stuck = false; for (int i = 0; i < N; i++) stuck |= s.a[i][c].place == YIELDS;
    if ((s.phase[c] == ACTIVE && touched && (stuck || !m_small)) || s.phase[c] == HOLDS) {  // it gives up, or releases
      State t = s; t.phase[c] = LEAVING;
      for (int i = 0; i < N; i++) {
        At& a = t.a[i][c]; bool known_there = a.place == VOTES || a.echo;
        bool open = a.kind && !a.said;
        if (open && !a.stray) a.stray = a.kind, a.sgen = a.kgen, a.sraise = a.raise;
        bool unsure = a.unsure || open || a.stray; a.kind = 0;
        a.tell = (m_acked && !known_there) ? 0 : unsure && !m_tomb ? 2 : 1;
      }
      add(t);
    }
    if (s.phase[c] == LEAVING) {
      bool all = true; for (int i = 0; i < N; i++) all &= !s.a[i][c].tell;
      if (all) {
        State t = s; t.phase[c] = ACTIVE;
        for (int i = 0; i < N; i++) { const At& a = s.a[i][c]; if (s.s[i].holder == c || a.echo || a.stray) return fail(s, "I3 it ended, and holds, waits or may come to hold", c); t.a[i][c] = At{}; }
        add(t);
      }
    }
    for (int i = 0; i < N && !bad; i++) {
      const At& a = s.a[i][c];
      if (a.tell) {
        State t = s; At& b = t.a[i][c]; if (b.tell == 2) b.stray = 0; b.tell = 0; b.echo = 0;
        if (t.s[i].holder == c) pass(t, i, [&](State& u) { add(u); }); else add(t);
      }
      if (a.stray && s.phase[c] != LEAVING + 9) { // executed late
        State t = s; t.a[i][c].stray = 0;
        execute(t, i, c, a.stray, a.sgen, a.sraise, [&](State& u, int, int) { add(u); });
        if (s.phase[c] != LEAVING) add(t);  // or never executed: only if no tombstone covers that case
      }
      if (s.phase[c] == LEAVING) continue;
      if (a.pgen && s.phase[c] == ACTIVE) {
        State t = s; heard(t, i, c); add(t);
        t = s; t.a[i][c].pgen = 0; add(t);  // lost
      }
      if (a.kind && a.said) {
        State t = s; At& b = t.a[i][c]; b.kind = 0; hears(t, i, c, a.kgen, a.said, a.sstamp, a.sstale); add(t);
        t = s; t.a[i][c].kind = 0; t.a[i][c].unsure = 1; add(t);  // lost after all
      }
      if (s.phase[c] != ACTIVE) continue;
      if (a.kind) continue;
      if (a.place == YIELDS && !m_lostgive) continue;  // a give-way without a reply: none of its statements count, and the claim must end
      uint8_t gen = std::max({a.gen, a.sgen, a.echo, a.pgen}) + 1;
      auto ask = [&](int kind, int raise) {
        State p = s; At& b = p.a[i][c];
        if (kind == GIVE && !m_yield) { b.place = m_lostgive ? NONE : YIELDS; if (!m_nofloor) b.gen = gen, b.push = 0; }
        execute(p, i, c, kind, gen, raise, [&](State& u, int said, int stamp) {
          State t = u; hears(t, i, c, gen, said, stamp, 0); add(t);
          if (s.faults && kinds & 2) { State l = u; l.faults--; At& x = l.a[i][c]; x.kind = kind, x.kgen = gen, x.raise = raise, x.said = said, x.sstamp = stamp, x.sstale = 0; add(l); }
        });
        if (s.faults && kinds & 4 && !a.stray) { State t = p; t.faults--; At& x = t.a[i][c]; x.stray = kind, x.sgen = gen, x.sraise = raise, x.unsure = 1; add(t); }
      };
      ask(ASK, 0);
      if (votes < NEED && a.place == VOTES) ask(GIVE, 0);
      if (votes >= NEED && most_same < NEED && a.place == VOTES) {
        int all = top; State& m = const_cast<State&>(s); stamps(m, [&](uint8_t& x) { all = std::max<int>(all, x); });
        raised_seen++;
        for (int n = top + 1; n <= all + 1; n++) ask(RAISE, n);
      }
    }
  }
}
int main(int n, char** v) {
  C = atoi(v[1]); M = v[4]; if (n > 5) most = atol(v[5]) * 1000000; if (n > 6) kinds = atoi(v[6]);
  if (M == "patient") m_small = true;  // not a mistake: a waiter gives up only if nothing else is left
  m_strict = is("stamp-not-strict"), m_max = is("max-of-votes"), m_anywhere = is("raise-anywhere"), m_nofloor = is("no-floor"), m_stale = is("stale-push"), m_yield = is("yield-counts"), m_tomb = is("no-tombstone"), m_guard = is("no-guard"), m_acked = is("acked-only"), m_minority = is("minority"), m_forget = is("no-clock"), m_oldanswer = is("old-answer"), m_lostgive = is("lost-give-way-forgotten");
  State s; memset(&s, 0, sizeof s); for (int i = 0; i < N; i++) s.s[i].holder = -1;
  s.faults = atoi(v[2]), s.restarts = atoi(v[3]); add(s);
  while (!todo.empty() && !bad && known.n < most) { State t = todo.back(); todo.pop_back(); look(t); static size_t next = 2000000; if (known.n > next) fprintf(stderr, "%zu known, %zu to do\n", known.n, todo.size()), next += 2000000; }
  if (!bad) printf("%s, %d claims, %s faults (kinds %d), %s restarts: %zu states%s, no violation (%zu times held, %zu with several stamps)\n", M.c_str(), C, v[2], kinds, v[3], known.n, todo.empty() ? " exhausted" : ", NOT exhausted", holds_seen, split_seen);
  return bad;
}
