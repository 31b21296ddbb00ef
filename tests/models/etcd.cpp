// Model of waiters on etcd that are admitted by the events of their watch, without a further request.
//
// The transaction that puts a key also reads which keys are ahead of it. A *look* is a later request that reads the
// same, at its own revision. One watch of the whole name reports each deletion, and a deleted key is no longer ahead. A
// watch reports in order, and either all or none of the deletions of a revision. But it may repeat its reports from the
// point where it began. So when no key is left ahead, the watch has proved two things: no key was ahead at this
// revision, and the waiter's own key had not been deleted by then. A look would have shown the same.
//
// The waiters of one client share the watch. The server states where the watch begins. If a waiter counted the keys
// ahead before that point, it looks again. A later waiter gets the reports that the watch has made since that waiter
// counted. The watch may stay open for any time without a waiter. Its proof is pushed, and the waiter reads the push at
// any later moment between two requests. Nothing is pushed to a waiter with a request under way. If a waiter received a
// push and then finds its key gone, it gives up its id.
//
// Every order of events is tried. At any moment:
//   - a request or a reply is late or lost, and a lost request is executed at any later moment;
//   - the member from which a watch reads is behind by any number of revisions;
//   - a stream breaks (also one whose past was compacted), and its deletions are not reported;
//   - a member that restores a snapshot repeats its reports;
//   - a lease expires, which deletes all its keys at one revision;
//   - a client stops forever while it believes, or looks without a reason;
//   - an operator deletes a key, or the whole name.
// A waiter that is too far behind to count the keys watches some keys ahead of it. Its later looks compare these keys
// and its own key. Only if one of them is gone, a look reads which keys are ahead. A join may be sent behind a key that
// the client already has in the queue. It puts the new key only if that other key is still there, and reads nothing.
//
// The model assumes that a client's validity ends before its lease. So a lease ends at any moment, but not while its
// client knows that the lease is valid. States are compared by a hash of 64 bits.
//
//     etcd <clients> <faults> <crashes> <deletes> <permits> <mistake or ->
//
// A crash may also be a client whose renewals get no reply in time, and that continues. <clients> has a word for each
// client. A comma separates two words, or a + if both clients share a watch. Each letter is an attempt (two at most,
// one after the other): X is exclusive, R is a reader, and P takes one of the permits. A claim with a lower-case letter
// does not count keys. The program prints what it found, and exits with 1 if that is a violation.
//
//   I1  all claims that believe that they hold may hold together, except those whose key an operator deleted
//   I2  a client that believes has a lease
//   I3  an id that was given up does not believe
//   I4  an admitted claim was ahead of all claims that it excludes, at the revision that admitted it
//   I5  the key of an admitted claim had not been deleted up to that revision, nor was a deletion reported later
//   I7  no waiter keeps waiting that could hold, has received all reports, and has no reason to look
//   I8  no waiter keeps waiting after its key was deleted
#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

constexpr int kClients = 4, kIds = 2 * kClients, kEvents = 12;

enum Phase : int8_t { kIdle, kJoining, kWaiting, kHolding, kLeaving, kDone };
enum Request : int8_t { kNone, kJoin, kLook, kGiveBack, kCancel };
enum Answer : int8_t { kOpen, kPut, kBehind, kFound, kRefused, kNoLease, kNotBehind, kThere, kStill, kGone, kGivenBack };

// What each mistake leaves out or does instead. The search must find each of them.
enum Mistake {
  kCorrect,
  kFromBefore,        // a deletion from before the count reduces it (that of an earlier key of this id)
  kFromTheAnswer,     // the watch is assumed to begin where the count was made
  kLogIgnored,        // a later waiter does not receive the earlier reports
  kClosedForAll,      // the first waiter that leaves closes the watch
  kCountsAll,         // a later key is counted as ahead
  kOwnIgnored,        // the deletion of the waiter's own key is ignored
  kHalfARevision,     // admitted before a whole revision was read
  kCountsOn,          // after a broken stream the count continues where the new stream begins
  kToldTwice,         // the count has numbers instead of keys, so a repeated report reduces it twice
  kFoundCounts,       // keys found by a request that was sent again count like those when it put the key
  kFromReceipt,       // validity counts from the push
  kAfterTheCancel,    // a push counts after the claim was given up
  kStalePush,         // a push counts after its key was found to be gone
  kRejoinKeepsCount,  // a key that is put again continues with the count of the first
  kOneMore,           // one permit too many
  kLikeExcludes,      // readers count as ahead of a reader, but their deletions do not reduce the count
  kBehindGone,        // a join behind a key does not compare that key
  kBehindLike,        // a join behind a key with which the claim shares the name
  kBehindFound,       // a key that was found, and may be older, waits for the key of that join
  kAnyRevision,       // a look compares that the watched keys exist, but not their revisions
  kOwnUncompared,     // a look does not compare the waiter's own key if the watched keys are there
  kWatchedLate,       // the watch begins at a later revision than the comparison
};
constexpr const char* kMistakes[] = {"-",          "frombefore", "fromanswer",  "logignored", "closedforall", "countsall",
                                     "ownignored", "half",       "countson",    "toldtwice",  "foundcounts",
                                     "receipt",    "aftercancel", "stalepush",  "rejoinkeeps", "onemore", "likeexcludes",
                                     "behindgone", "behindlike", "behindfound", "anyrevision", "ownuncompared",
                                     "watchedlate"};

struct Client {
  int8_t attempt, phase, alive;
  int8_t unsure;         // whether some join of this id has no reply
  int8_t valid;          // whether it knows that its lease is alive
  int8_t proof;          // whether it counts keys
  int8_t from;           // the revision of its count
  uint8_t ahead, like;   // as sets: the ids ahead that it excludes, and those that may hold together with it
  int8_t pushed;         // the revision at which it was first, or 0 without a push
  int8_t pushed_of;      // the revision of the key to which the push belongs
  int8_t revision;       // the revision of its key, or 0 if it knows none
  int8_t watched;        // if it does not count: the ids whose deletion makes it look
  int8_t behind;         // the ids whose keys a look or a join compares
  int8_t behind_gone;    // the truth: one of these keys was deleted
  int8_t seen;           // the revision up to which it has received reports
  int8_t look;           // whether it must look
  int8_t gone_at;        // the truth: the revision at which the key that it knows was deleted
  int8_t request, answer, answer_revision, answer_born;
  uint8_t answer_ahead, answer_like;
  int8_t answer_watched, answer_gone;
};
struct Watch {           // watch of the whole name by one process
  int8_t open;           // 1: requested, 2: the server has stated where it begins
  int8_t floor, seen;    // the revision after which it reports, and the one up to which it has reported
};
struct Event {
  int8_t revision, id, born;
};
struct State {
  int8_t revision;
  int8_t born[kIds];        // create_revision of its key, or 0 without a key
  int8_t stray[kIds];       // a join for whose reply nobody waits
  uint8_t ended;            // the leases that have ended
  uint8_t tombstones, voided, finished;
  int8_t faults, crashes, deletes, events;
  Event event[kEvents];
  Client client[kClients];
  Watch watch[kClients];    // each process uses the entry of its first client
};
static_assert(std::has_unique_object_representations_v<State>);

struct Violation {
  const char* what;
};

int clients, permits, process[kClients];
std::vector<std::string> words;
Mistake mistake;

char mode(int id) { return static_cast<char>(std::toupper(words[id / 2][id % 2])); }
bool counts(int id) { return std::isupper(words[id / 2][id % 2]) != 0; }
bool fits(int a, int b) { return mode(a) == mode(b) && mode(a) != 'X'; }
int room(int id) { return mode(id) == 'P' ? permits + (mistake == kOneMore) : kIds; }
bool has_lease(const State& s, int c) { return !(s.ended >> c & 1); }
int id_of(const State& s, int c) { return 2 * c + s.client[c].attempt; }

// ---- the server

void erase(State& s, int id) {  // at the present revision
  if (!s.born[id]) return;
  if (s.events == kEvents) throw Violation{"the model has too few events"};
  s.event[s.events++] = {s.revision, static_cast<int8_t>(id), s.born[id]};
  Client& c = s.client[id / 2];
  if (id == id_of(s, id / 2) && c.revision == s.born[id]) c.gone_at = s.revision;
  for (Client& each : s.client) {
    each.behind_gone |= each.behind >> id & 1;
    each.answer_gone |= each.answer_watched >> id & 1;
  }
  s.born[id] = 0;
}

void put(State& s, int id) {
  s.born[id] = ++s.revision;
}

uint8_t older(const State& s, int id, int than, bool like) {
  int who = 0;
  for (int other = 0; other < kIds; other++)
    if (other != id && s.born[other] && s.born[other] < than && fits(id, other) == like) who |= 1 << other;
  return static_cast<uint8_t>(who);
}

// The keys that it watches: the newest one that excludes it, or as many as there are permits.
int behind_whom(const State& s, int id) {
  std::vector<std::pair<int, int>> others, like;
  for (int other = 0; other < kIds; other++)
    if (other != id && s.born[other] && s.born[other] < s.born[id])
      (fits(id, other) ? like : others).push_back({s.born[other], other});
  if (!others.empty()) return 1 << std::max_element(others.begin(), others.end())->second;
  std::sort(like.rbegin(), like.rend());
  int mask = 0;
  if (static_cast<int>(like.size()) >= room(id))
    for (int i = 0; i < room(id); i++) mask |= 1 << like[i].second;
  return mask;
}

bool still_behind(const State& s, const Client& me) {
  if (mistake != kAnyRevision) return !me.behind_gone;
  for (int id = 0; id < kIds; id++)
    if (me.behind >> id & 1 && !s.born[id]) return false;
  return true;
}

void execute(State& s, int c) {
  Client& me = s.client[c];
  int id = id_of(s, c);
  switch (me.request) {
    case kJoin:
      if (!has_lease(s, c)) {
        me.answer = kNoLease;
      } else if (s.born[id]) {
        me.answer = kFound;
      } else if (s.tombstones >> id & 1) {
        me.answer = kRefused;
      } else if (me.behind_gone && mistake != kBehindGone) {
        me.answer = kNotBehind;
      } else {
        put(s, id);
        me.answer = me.behind ? kBehind : kPut;
      }
      me.answer_born = s.born[id];
      break;
    case kLook:
      me.answer = s.born[id] && s.born[id] == me.revision ? kThere : kGone;
      if (me.behind && still_behind(s, me) && (me.answer == kThere || mistake == kOwnUncompared)) me.answer = kStill;
      break;
    case kCancel:
      if (has_lease(s, c)) s.tombstones |= 1 << id;
      [[fallthrough]];
    case kGiveBack:
      if (s.born[id]) {
        s.revision++;
        erase(s, id);
      }
      me.answer = kGivenBack;
      break;
  }
  me.answer_revision = s.revision;
  if (me.answer == kPut || me.answer == kFound || me.answer == kThere) {
    bool all = me.answer == kFound;  // this count does not stop at the waiter's own key
    me.answer_ahead = older(s, id, all ? 127 : s.born[id], false);
    me.answer_like = older(s, id, all ? 127 : s.born[id], true);
    me.answer_watched = static_cast<int8_t>(behind_whom(s, id));
    me.answer_gone = 0;
  }
}

// ---- the client

void next_attempt(State& s, int c) {
  Client& me = s.client[c];
  s.finished |= 1 << id_of(s, c);
  int8_t attempt = me.attempt + 1, valid = me.valid;
  bool more = attempt < static_cast<int>(words[c].size());
  me = {};
  me.alive = 1;
  me.attempt = more ? attempt : attempt - 1;
  me.phase = more ? kIdle : kDone;
  me.valid = valid;
}

void ask(Client& me, Request request) {
  me.request = request;
  me.answer = kOpen;
  me.answer_revision = me.answer_born = me.answer_ahead = me.answer_like = me.answer_watched = me.answer_gone = 0;
}

void leave(Client& me) {
  if (me.request == kJoin) me.unsure = 1;
  me.phase = kLeaving;
  if (mistake != kAfterTheCancel) me.proof = me.pushed = me.pushed_of = 0;
  me.watched = me.look = me.behind = me.behind_gone = 0;
  ask(me, me.unsure ? kCancel : kGiveBack);
}

void believe(State& s, int c, int at, int revision) {
  Client& me = s.client[c];
  int id = id_of(s, c);
  if (me.phase == kLeaving || s.finished >> id & 1) throw Violation{"I3: an id that was given up believes"};
  if (me.gone_at && me.gone_at <= at) throw Violation{"I5: its own key had been deleted"};
  if (revision != me.revision) throw Violation{"I5: it was told that its own key had been deleted"};
  int others = 0, like = 0;
  for (int other = 0; other < kIds; other++)
    if (other != id && s.born[other] && s.born[other] < revision) (fits(id, other) ? like : others)++;
  for (int i = 0; i < s.events; i++)
    if (const Event& e = s.event[i]; e.id != id && e.born < revision && e.revision > at)
      (fits(id, e.id) ? like : others)++;
  if (others || (mode(id) == 'P' && like >= permits)) throw Violation{"I4: somebody whom it excludes was ahead"};
  if (!me.gone_at) s.voided &= ~(1 << id);
  me.phase = kHolding;
  me.proof = me.pushed = me.pushed_of = 0;
  me.look = me.watched = me.behind = me.behind_gone = 0;
}

void look_again(Client& me) {
  me.proof = me.watched = 0;
  me.look = 1;
}

void one_less(uint8_t& who) { who &= who - 1; }

void tell(State& s, int c, int at) {  // report all deletions at this revision to a client that counts keys
  Client& me = s.client[c];
  int id = id_of(s, c);
  bool own = false;
  auto first = [&] { return !me.ahead && std::popcount(me.like) < room(id); };
  auto push = [&] {
    me.pushed = static_cast<int8_t>(at), me.pushed_of = me.revision, me.proof = 0;
    if (mistake == kFromReceipt) me.valid = 1;
  };
  for (int i = 0; i < s.events; i++) {
    const Event& e = s.event[i];
    if (e.revision != at) continue;
    if (e.id == id && e.born == me.revision) {
      own = mistake != kOwnIgnored;
    } else if (e.born < me.revision ? mistake == kToldTwice : mistake == kCountsAll) {
      one_less(fits(id, e.id) ? me.like : me.ahead);
    } else {
      (fits(id, e.id) ? me.like : me.ahead) &= ~(1 << e.id);
    }
    if (mistake == kHalfARevision && !own && first()) return push();
  }
  if (own) {
    me.proof = mistake == kRejoinKeepsCount && own;
    me.look = me.phase == kWaiting;
  } else if (first()) {
    push();
  }
}

void settle(State& s, int c) {  // the reports of the watch since the waiter counted
  Client& me = s.client[c];
  const Watch& w = s.watch[process[c]];
  if (w.open != 2) return;
  if (me.from < w.floor && mistake != kFromTheAnswer) return look_again(me);
  if (mistake == kLogIgnored) return;
  int last = std::max<int>(mistake == kFromBefore ? 0 : me.from, w.floor);
  for (int i = 0; i < s.events && me.proof; i++)
    if (int at = s.event[i].revision; at > last && at <= w.seen) tell(s, c, last = at);
}

void wait_behind(State& s, int c) {  // watch the keys that were compared or read
  Client& me = s.client[c];
  me.phase = kWaiting;
  me.look = 0;
  me.seen = mistake == kWatchedLate ? s.revision : me.answer_revision;
  me.watched = static_cast<int8_t>(me.behind | 1 << id_of(s, c));
}

void wait(State& s, int c) {  // begin to wait at the revision of a reply
  Client& me = s.client[c];
  me.phase = kWaiting;
  me.look = me.watched = me.behind = me.behind_gone = 0;
  if (!counts(id_of(s, c))) {
    me.behind = me.answer_watched, me.behind_gone = me.answer_gone;
    return wait_behind(s, c);
  }
  if (!(mistake == kRejoinKeepsCount && me.proof)) {
    me.ahead = me.answer_ahead, me.like = me.answer_like;
    if (mistake == kLikeExcludes && mode(id_of(s, c)) == 'R') me.ahead |= me.like;
  }
  me.from = me.answer_revision;
  me.proof = 1;
  Watch& w = s.watch[process[c]];
  if (!w.open) w.open = 1;
  settle(s, c);
}

void know(State& s, int c) {  // record the key in a reply, and whether it was deleted since
  Client& me = s.client[c];
  int id = id_of(s, c);
  me.revision = me.answer_born;
  me.gone_at = 0;
  if (s.born[id] != me.revision)
    for (int i = 0; i < s.events; i++)
      if (s.event[i].id == id && s.event[i].born == me.revision) me.gone_at = s.event[i].revision;
}

void answered(State& s, int c) {
  Client& me = s.client[c];
  Answer answer = static_cast<Answer>(me.answer);
  me.request = kNone;
  switch (answer) {
    case kFound:
      know(s, c);
      if (mistake != kBehindFound) me.behind = me.behind_gone = 0;
      if (mistake == kFoundCounts) {
        wait(s, c);
      } else {
        me.phase = kWaiting;
        look_again(me);
      }
      break;
    case kBehind:
      know(s, c);
      [[fallthrough]];
    case kStill:
      wait_behind(s, c);
      break;
    case kNotBehind:
      me.behind = me.behind_gone = 0;
      ask(me, kJoin);
      break;
    case kPut:
      know(s, c);
      [[fallthrough]];
    case kThere:
      if (me.answer_watched)
        wait(s, c);
      else if (me.valid)
        believe(s, c, me.answer_revision, me.revision);
      else
        me.phase = kWaiting, look_again(me);  // its lease must be renewed first
      break;
    case kGone:
      if (me.pushed && mistake != kStalePush) {  // the push may be read at any time
        leave(me);
      } else {  // it joins again, with the same id
        me.phase = kJoining;
        if (mistake != kRejoinKeepsCount) me.proof = 0;
        me.look = me.watched = me.behind = me.behind_gone = 0;
        ask(me, kJoin);
      }
      break;
    case kNoLease:
    case kRefused:
    case kGivenBack:
      next_attempt(s, c);
      break;
    case kOpen:
      break;
  }
}

int next_told(const State& s, int seen) {
  for (int i = 0; i < s.events; i++)
    if (s.event[i].revision > seen) return s.event[i].revision;
  return 0;
}

bool is_told(const Client& me) {
  return me.proof && (me.phase == kWaiting || me.phase == kLeaving);
}

void hear(State& s, int p) {  // the next revision on the watch of a process
  Watch& w = s.watch[p];
  int at = next_told(s, w.seen);
  w.seen = static_cast<int8_t>(at);
  for (int c = 0; c < clients; c++)
    if (process[c] == p && is_told(s.client[c]) && at > s.client[c].from) tell(s, c, at);
}

void hear_alone(State& s, int c) {  // the next revision on the watch of a client that does not count
  Client& me = s.client[c];
  int at = next_told(s, me.seen);
  me.seen = static_cast<int8_t>(at);
  for (int i = 0; i < s.events; i++)
    if (s.event[i].revision == at && me.watched >> s.event[i].id & 1) me.look = 1;
}

// ---- invariants

void check(const State& s) {
  std::vector<int> believers;
  for (int c = 0; c < clients; c++) {
    const Client& me = s.client[c];
    int id = id_of(s, c);
    if (me.phase == kHolding && me.valid && !(s.voided >> id & 1)) {
      believers.push_back(id);
      if (!has_lease(s, c)) throw Violation{"I2: believes without a lease"};
    }
    const Watch& w = s.watch[process[c]];
    bool asleep = me.alive && me.phase == kWaiting && !me.request && !me.look && !me.pushed;
    bool heard = !next_told(s, me.seen);
    if (me.proof) heard = !w.open || (w.open == 2 && !next_told(s, w.seen));
    if (asleep && heard && s.born[id] != me.revision) throw Violation{"I8: it sleeps, and its key is gone"};
    if (asleep && heard && s.born[id] && s.born[id] == me.revision &&
        !older(s, id, me.revision, false) && (mode(id) != 'P' || std::popcount(older(s, id, me.revision, true)) < permits))
      throw Violation{"I7: it sleeps, and fits"};
  }
  for (int a : believers) {
    int like = 0;
    for (int b : believers) {
      if (a != b && !fits(a, b)) throw Violation{"I1: two believe who exclude each other"};
      like += a != b;
    }
    if (mode(a) == 'P' && like >= permits) throw Violation{"I1: more permits than there are"};
  }
}

// ---- all states

bool matters_to(const State& s, int c, const Event& e) {
  const Client& me = s.client[c];
  int after = 127;
  if (me.watched) after = me.seen;
  if (const Watch& w = s.watch[process[c]]; is_told(me))
    after = std::min<int>(after, w.open == 2 && !s.faults ? std::max(me.from, w.seen) : me.from);
  if (me.pushed) after = std::min<int>(after, me.pushed);
  if (me.request && me.answer) after = std::min<int>(after, me.answer_revision);
  return e.revision > after && (e.id == id_of(s, c) || e.born < std::max(me.revision, me.answer_born));
}

bool matters(const State& s, const Event& e) {
  for (int c = 0; c < clients; c++)
    if (matters_to(s, c, e)) return true;
  return false;
}

void pass_over(State& s, int p) {  // skip the revisions that matter to no user of this watch
  Watch& w = s.watch[p];
  int before = 127;  // the first revision that matters
  for (int i = s.events - 1; i >= 0; i--)
    for (int c = p; c < clients; c++)
      if (process[c] == p && s.event[i].revision > w.seen && (mistake || matters_to(s, c, s.event[i])))
        before = s.event[i].revision;
  for (int i = 0; i < s.events; i++)
    if (s.event[i].revision < before) w.seen = std::max(w.seen, s.event[i].revision);
  if (before == 127) w.seen = s.revision;
}

void forget(State& s) {  // forget what no later step reads
  int heard = s.revision;
  for (int c = 0; c < clients; c++) {
    Client& me = s.client[c];
    if (!me.request) me.answer = kOpen;
    if (!me.request || !me.answer)
      me.answer_revision = me.answer_born = me.answer_ahead = me.answer_like = me.answer_watched = me.answer_gone = 0;
    if (!me.alive) me.look = me.watched = me.proof = me.pushed = me.pushed_of = 0;
    if (!is_told(me)) me.from = me.ahead = me.like = 0;
    if (!me.watched) me.seen = 0;
    if (!me.alive && !me.request) me.behind = me.behind_gone = 0;
    if (me.phase == kHolding || me.phase == kLeaving) me.gone_at = 0;
    if (me.phase == kHolding && mistake != kRejoinKeepsCount) me.revision = 0;
    if (me.watched) heard = std::min<int>(heard, me.seen);
    if (me.request && me.answer) heard = std::min<int>(heard, me.answer_revision);
    if (me.pushed) heard = std::min<int>(heard, me.pushed);
    bool there = s.stray[2 * c] || s.stray[2 * c + 1] || s.born[2 * c] || s.born[2 * c + 1];
    if (me.phase == kDone && !there) s.ended |= 1 << c;
    if (me.phase == kDone) me.valid = 0;
    if (!has_lease(s, c)) s.stray[2 * c] = s.stray[2 * c + 1] = 0;
  }
  for (int p = 0; p < clients; p++) {
    Watch& w = s.watch[p];
    bool alive = false, floor = false;
    for (int c = p; c < clients; c++) {
      Client& me = s.client[c];
      if (process[c] != p) continue;
      alive |= me.alive && me.phase != kDone;
      if (me.request && me.answer && me.answer_revision < w.floor) floor = true;
    }
    if (!alive) w = {};
    if (w.open != 2) w.floor = w.seen = 0;
    if (!floor && !s.faults) w.floor = 0;  // after a fault it may be repeated from there
    if (w.open == 2) pass_over(s, p);
    for (int c = p; c < clients; c++)
      if (Client& me = s.client[c]; process[c] == p && me.proof) {
        if (w.open == 2 && !s.faults && me.from <= w.seen)
          me.from = 0;
        else
          heard = std::min<int>(heard, me.from);
      }
    if (w.open == 2) heard = std::min<int>(heard, s.faults ? w.floor : w.seen);
  }
  if (mistake == kFromBefore) heard = 0;
  int kept = 0;
  for (int i = 0; i < s.events; i++)
    if (s.event[i].revision > heard && (mistake != kCorrect || matters(s, s.event[i]))) s.event[kept++] = s.event[i];
  for (int i = kept; i < s.events; i++) s.event[i] = {};
  s.events = static_cast<int8_t>(kept);
}

template <class Do>
void each_revision(State& s, Do act) {
  act(s.revision);
  for (int8_t& born : s.born) act(born);
  for (int i = 0; i < s.events; i++) act(s.event[i].revision), act(s.event[i].born);
  for (Client& me : s.client)
    act(me.revision), act(me.from), act(me.pushed), act(me.pushed_of), act(me.seen), act(me.gone_at),
        act(me.answer_revision), act(me.answer_born);
  for (Watch& w : s.watch) act(w.floor), act(w.seen);
}

void renumber(State& s) {  // only the order of revisions matters
  int8_t rank[128] = {}, next = 0;
  each_revision(s, [&](int8_t& revision) { rank[revision] = 1; });
  rank[0] = 0;
  for (int i = 1; i < 128; i++)
    if (rank[i]) rank[i] = ++next;
  each_revision(s, [&](int8_t& revision) { revision = rank[revision]; });
}

struct Search {
  std::unordered_set<uint64_t> known;
  std::deque<State> open;

  void add(State s) {
    check(s);
    forget(s);
    renumber(s);
    uint64_t hash = 1469598103934665603u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&s);
    for (size_t i = 0; i < sizeof s; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    hash ^= hash >> 29;
    if (known.insert(hash).second) open.push_back(s);
  }

  void from(const State& s) {
    for (int c = 0; c < clients; c++) of_client(s, c);
    for (int p = 0; p < clients; p++) of_watch(s, p);
    for (int id = 0; id < kIds; id++)
      if (s.stray[id]) {
        State n = s;
        n.stray[id] = 0;
        if (has_lease(n, id / 2) && !n.born[id] && !(n.tombstones >> id & 1)) put(n, id);
        add(n);
      }
    for (int c = 0; c < clients; c++)
      if (has_lease(s, c) && !s.client[c].valid) {
        State n = s;
        n.ended |= 1 << c;
        n.revision++;
        erase(n, 2 * c), erase(n, 2 * c + 1);
        add(n);
      }
    if (s.deletes) {
      State all = s;
      all.deletes--, all.revision++;
      for (int id = 0; id < kIds; id++)
        if (s.born[id]) {
          State n = s;
          n.deletes--, n.revision++;
          n.voided |= 1 << id;
          erase(n, id);
          add(n);
          all.voided |= 1 << id;
          erase(all, id);
        }
      add(all);
    }
  }

  void of_client(const State& s, int c) {
    const Client& me = s.client[c];
    int id = id_of(s, c);
    if (me.request && !me.answer) {  // even if its client has stopped
      State n = s;
      execute(n, c);
      add(n);
    }
    if (me.valid && me.phase != kIdle && me.phase != kDone && (s.crashes || !me.alive)) {  // no renewal was in time
      State n = s;
      n.crashes -= me.alive;
      n.client[c].valid = 0;
      add(n);
    }
    if (!me.alive) return;
    if (s.crashes && me.phase != kIdle && me.phase != kDone) {
      State n = s;
      n.crashes--;
      n.client[c].alive = 0;
      add(n);
    }
    if (me.phase == kDone) return;
    if (me.request && me.answer) {
      State n = s;
      answered(n, c);
      add(n);
    }
    // The join is sent behind a key of this client that waits or holds.
    if (me.request == kJoin && !me.answer && !me.behind)
      for (int other = 0; other < clients; other++) {
        const Client& mate = s.client[other];
        int its = id_of(s, other);
        bool known = (mate.phase == kWaiting && mate.revision) || mate.phase == kHolding;
        if (other == c || process[other] != process[c] || !known || fits(id, its) != (mistake == kBehindLike)) continue;
        State n = s;
        n.client[c].behind = static_cast<int8_t>(1 << its);
        n.client[c].behind_gone = mate.phase == kHolding ? !s.born[its] : mate.gone_at != 0;
        add(n);
      }
    if (me.request && s.faults) {  // the request or its reply is lost
      State n = s;
      n.faults--;
      Client& mine = n.client[c];
      if (!me.answer && me.request == kJoin) n.stray[id] = 1;
      if (me.request == kJoin) mine.unsure = 1;
      ask(mine, me.request == kGiveBack ? kCancel : static_cast<Request>(me.request));  // the request is sent again
      add(n);
    }
    if (!me.valid && has_lease(s, c) && me.phase != kHolding) {  // a renewal succeeded, but a lost lock stays lost
      State n = s;
      n.client[c].valid = 1;
      add(n);
    }
    if (me.phase == kIdle && has_lease(s, c)) {
      State n = s;
      n.client[c].phase = kJoining;
      ask(n.client[c], kJoin);
      add(n);
    }
    // The client gives up, releases, or has lost the lock.
    if (me.phase == kJoining || me.phase == kWaiting || me.phase == kHolding) {
      State n = s;
      leave(n.client[c]);
      if (me.request == kJoin && !me.answer) n.stray[id] = 1;
      add(n);
    }
    // A report or a timer makes the client look.
    if (me.phase == kWaiting && !me.request && (me.look || (s.faults && (me.proof || me.pushed)))) {
      State n = s;
      n.faults -= !me.look;
      if (mistake != kRejoinKeepsCount) n.client[c].proof = 0;
      n.client[c].look = 0;
      ask(n.client[c], kLook);
      add(n);
    }
    if (me.pushed && (me.phase == kWaiting || me.phase == kLeaving) && !(me.phase == kWaiting && me.request)) {
      State n = s;
      Client& mine = n.client[c];
      if (mine.valid) {
        believe(n, c, mine.pushed, mine.pushed_of);
      } else {
        mine.pushed = mine.pushed_of = 0;
        if (mine.phase == kWaiting) look_again(mine);
      }
      add(n);
    }
    if (me.watched && next_told(s, me.seen)) {
      State n = s;
      hear_alone(n, c);
      add(n);
    }
  }

  void of_watch(const State& s, int p) {
    const Watch& w = s.watch[p];
    bool needed = false, heeded = w.open;
    for (int c = 0; c < clients; c++)
      if (const Client& me = s.client[c]; process[c] == p) needed |= is_told(me), heeded |= me.watched;
    if (w.open == 1)  // by a member that is behind by any number of revisions
      each_revision_once(s, [&](int8_t from) {
        State n = s;
        n.watch[p] = {2, from, from};
        for (int c = 0; c < clients; c++)
          if (process[c] == p && is_told(n.client[c])) settle(n, c);
        add(n);
      });
    if (w.open == 2 && next_told(s, w.seen)) {
      State n = s;
      hear(n, p);
      add(n);
    }
    // The member of a watch restores a snapshot, and repeats its reports.
    if (w.open == 2 && s.faults && needed && w.seen > w.floor) {
      State n = s;
      n.faults--;
      n.watch[p].seen = w.floor;
      add(n);
    }
    if (w.open && (!needed || mistake == kClosedForAll)) {
      State n = s;
      n.watch[p] = {};
      add(n);
    }
    if (heeded && s.faults) {  // the stream breaks
      State n = s;
      n.faults--;
      if (mistake == kCountsOn) {
        n.watch[p].seen = s.revision;
      } else {
        n.watch[p] = {};
        for (int c = 0; c < clients; c++)
          if (Client& me = n.client[c]; process[c] == p && me.phase == kWaiting && !me.request) look_again(me);
      }
      add(n);
    }
  }

  template <class Do>
  void each_revision_once(const State& s, Do act) {
    State copy = s;
    bool known[128] = {};
    each_revision(copy, [&](int8_t& revision) { known[revision] = true; });
    known[0] = true;
    for (int8_t i = 0; i <= s.revision; i++)
      if (known[i]) act(i);
  }
};

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  std::string word;
  for (const char* p = argv[1];; p++)
    if (*p == ',' || *p == '+' || !*p) {
      if (words.size() == kClients) return 2;
      words.push_back(word);
      word.clear();
      int next = static_cast<int>(words.size());
      if (next < kClients) process[next] = *p == '+' ? process[next - 1] : next;
      if (!*p) break;
    } else {
      word += *p;
    }
  clients = static_cast<int>(words.size());
  State first = {};
  first.faults = static_cast<int8_t>(std::atoi(argv[2]));
  first.crashes = static_cast<int8_t>(std::atoi(argv[3]));
  first.deletes = static_cast<int8_t>(std::atoi(argv[4]));
  permits = std::atoi(argv[5]);
  while (mistake < static_cast<int>(std::size(kMistakes)) && std::string_view(kMistakes[mistake]) != argv[6])
    mistake = static_cast<Mistake>(mistake + 1);
  if (mistake == static_cast<int>(std::size(kMistakes)) || clients > kClients) return 2;
  for (int c = 0; c < kClients; c++) {
    if (c >= clients) first.ended |= 1 << c;
    first.client[c].alive = c < clients;
    first.client[c].valid = c < clients;
  }
  Search search;
  try {
    search.add(first);
    while (!search.open.empty()) {
      State s = search.open.front();
      search.open.pop_front();
      search.from(s);
    }
  } catch (const Violation& found) {
    std::printf("%s %s: %s, after %zu states\n", argv[1], argv[6], found.what, search.known.size());
    return 1;
  }
  std::printf("%s %s %s %s: holds, %zu states\n", argv[1], argv[2], argv[3], argv[4], search.known.size());
  return 0;
}
