// Ranges and schedules as Python sees them.
#include "schedule.h"
#include "updates.h"

#include <pthread.h>

#include <cstring>

using namespace lowtide;

namespace {

std::vector<Tier> waiting_tiers;
constexpr uint64_t kPrime = 0x100000001B3ull;  // of a hash
constexpr int64_t kStorageColumns = 7;

void pause_ranges() {
  ranges().pause_for_fork();
}
void resume_ranges() {
  ranges().resume_after_fork();
}
void abandon_ranges() {
  ranges().abandon_in_child();
}

}  // namespace

extern "C" {

// Add a tier below fast memory; `capacity` in bytes, -1: none is known.
void lt_tier_add(const int* fds, int fd_count, int64_t stripe, int64_t capacity, MediumCall call) {
  Tier tier;
  tier.fds.assign(fds, fds + fd_count);
  tier.stripe = stripe;
  tier.call = call;
  tier.extents = Extents(capacity);
  waiting_tiers.push_back(std::move(tier));
}

// Say of the tier that was added last that it has native functions, which are called with `context`.
void lt_tier_engine(EngineCall move, AliveCall alive, void* context) {
  Tier& tier = waiting_tiers.back();
  tier.engine = move;
  tier.alive = alive;
  tier.context = context;
}

// Say of the tier that was added last that operators read and write it in place, and what that costs. Rates in bytes per
// second, times in seconds; see SlowRates for their order. All 0: as it comes.
void lt_tier_addressable(const double* rates, int64_t cache_bytes, int own_channel, int duplex) {
  Tier& tier = waiting_tiers.back();
  tier.addressable = true;
  auto per_ns = [](double per_s) { return per_s * 1e-9; };
  SlowRates& r = tier.rates;
  r.read = per_ns(rates[0]);
  r.write = per_ns(rates[1]);
  r.mixed_share = rates[2];
  r.latency_ns = rates[3] * 1e9;
  r.fast = per_ns(rates[4]);
  r.migrate_out = per_ns(rates[5]);
  r.migrate_in = per_ns(rates[6]);
  r.waited_out = per_ns(rates[7]);
  r.waited_in = per_ns(rates[8]);
  r.out_latency_ns = rates[9] * 1e9;
  r.in_latency_ns = rates[10] * 1e9;
  r.own_channel = own_channel != 0;
  r.duplex = duplex != 0;
  r.cache_bytes = cache_bytes;
}

// Add a file that ranges can be read from in place, while they run. Places: offset, begin in the file, bytes in memory,
// conversion.
// Returns its number as a tier.
int lt_source_add(int fd, int direct, int64_t count, const int64_t* places) {
  auto source = std::make_shared<Source>(fd, direct != 0);
  for (const int64_t* row = places; row < places + 4 * count; row += 4)
    source->add(row[0], {row[1], row[2], static_cast<Conversion>(row[3])});
  std::lock_guard<std::mutex> guard(pages().mutex);
  return ranges().add_source(std::move(source));
}

// Whether ranges may leave now.
int lt_ranges_running() {
  return ranges().running() ? 1 : 0;
}

// Let ranges of at least `least` bytes leave to the tiers that were added. Returns the number of the first of these.
int lt_ranges_start(int64_t least, int verify, int threads) {
  static std::once_flag once;
  std::call_once(once, [] {
    survive_forks();
    pthread_atfork(&pause_ranges, &resume_ranges, &abandon_ranges);
  });
  std::vector<Tier> tiers = std::move(waiting_tiers);
  waiting_tiers.clear();
  catch_faults();
  ranges().verify = verify != 0;
  ranges().least_bytes = std::max(least, kLarge);
  ranges().announcing = true;
  return ranges().start(std::move(tiers), threads);
}

// Serve faults before anybody who has come to handle them since.
void lt_catch_faults() {
  catch_faults();
}

// Bring back what is away, if so asked, and let nothing leave any more. Returns an errno for what is lost, or 0.
int lt_ranges_stop(int bring_back) {
  WithoutGil released;
  if (in_forked_child()) return 0;
  bool whole = updates().run_all();
  if (!whole) updates().give_up_all();
  remakes().remake_all();
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    schedule().clear();
  }
  int error = ranges().stop_waiting(bring_back != 0);
  return error || whole ? error : kLost;
}

// Who is given up first from here on: one of `Order`; `discards`: without a copy, as far as it can be made again.
void lt_order(int order, int discards) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().order = static_cast<Order>(order);
  remakes().discards_victims = discards != 0;
  if (discards) remakes().start();
}

void lt_announce(int on) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().announcing = on != 0;
}

// Make everything leave that may: for tests.
void lt_leave_all() {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().leave_all();
}

// Add a codec for plans to name. Returns its number.
// `most_error`: see Note [Rounded]; 0: every bit comes back.
int lt_coder_add(EncodeCall encode, DecodeCall decode, double most_error, int in_python) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().coders.push_back({encode, decode, most_error == 0, in_python != 0, most_error});
  return static_cast<int>(ranges().coders.size()) - 1;
}

// What codecs would leave of ranges that left while the log was on: serial, number of the codec, share; then forgotten.
// Returns how many rows there are; `out` has room for `most`, and nothing is forgotten where that is too little.
int64_t lt_take_samples(double* out, int64_t most) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  int64_t rows = 0;
  for (const auto& [serial, shares] : ranges().samples) rows += static_cast<int64_t>(shares.size()) - 1;
  if (rows > most) return rows;
  for (const auto& [serial, shares] : ranges().samples)
    for (size_t coder = 1; coder < shares.size(); ++coder) {
      double row[] = {static_cast<double>(serial), static_cast<double>(coder), shares[coder]};
      std::memcpy(out, row, sizeof(row));
      out += 3;
    }
  ranges().samples.clear();
  return rows;
}

void lt_take_back(int64_t serial) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = ranges().of_serial(serial);
  if (!range) return;
  --range->lent;
  ranges().note_write(range);
  ranges().unpin(range);
}

void lt_unpin(int64_t serial) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  if (Range* range = ranges().of_serial(serial)) ranges().unpin(range);
}

// Wait until no transfer is under way.
void lt_settle() {
  WithoutGil released;
  ranges().idle_waiting();
}

// Give pages up until the budget holds. Returns the bytes that are still beyond it.
int64_t lt_shrink() {
  WithoutGil released;
  for (;;) {
    uint64_t epoch;
    {
      std::lock_guard<std::mutex> guard(pages().mutex);
      pages().trim_for(0);
      int64_t excess = counters.reserved.load() - counters.budget.load();
      if (!counters.budget.load() || excess <= 0) return 0;
      epoch = ranges().epoch();
      ranges().shrink(excess);
      pages().trim_for(0);
      excess = counters.reserved.load() - counters.budget.load();
      if (excess <= 0) return 0;
      if (ranges().counted.leaving == 0) return excess;
    }
    ranges().progress_waiting(epoch);
  }
}

// leaving, arriving, written, read, released, faults, write faults, touches, waits, wait ns, beyond, ranges, bytes away;
// bytes discarded, calls that ran again, ns that took, trials, ranges that were not discarded; bytes in slow memory, the
// most of them, ns charged, operators that touched them, bytes that migrated there and back, bytes that were made there,
// bytes that moved within it; bytes that were encoded, decoded, and not encoded after all
void lt_range_counters(int64_t* out) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  const RangeCounters& c = ranges().counted;
  int64_t away = 0;
  ranges().each([&](Range* range) { away += range->place == Place::kAway ? range->bytes : 0; });
  const RemakeCounters& r = remakes().counted;
  int64_t values[] = {c.leaving, c.arriving, c.written, c.read,   c.released,       c.faults,
                      c.write_faults, c.touches, c.waits, c.wait_ns, c.beyond, ranges().count(),
                      away, r.discarded, r.calls, r.ns, r.trials, r.refused,
                      c.slow, c.peak_slow, c.charged_ns, c.in_place, c.placed, c.fetched, c.born_slow,
                      c.compacted, c.encoded, c.decoded, c.unencoded, c.excerpted};
  std::memcpy(out, values, sizeof(values));
}

// Bytes written to and read from a tier.
void lt_tier_counters(int tier, int64_t* out) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().bury_children();
  out[0] = ranges().tiers.at(tier).written_bytes;
  out[1] = ranges().tiers.at(tier).read_bytes;
  out[2] = ranges().tiers.at(tier).extents.used();
  out[3] = ranges().tiers.at(tier).link.runs;
  out[4] = ranges().tiers.at(tier).link.run_bytes;
}

void lt_range_meter(double* out) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().meter.read(out);
}

// code, bytes and tier of the trouble that stopped the program, then of the last write that failed; both are forgotten.
void lt_take_trouble(int64_t* out) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  const Trouble &read = ranges().trouble(), &write = ranges().failed_write();
  int64_t values[] = {read.code, read.bytes, read.tier, write.code, write.bytes, write.tier};
  std::memcpy(out, values, sizeof(values));
  ranges().forget_trouble();
}

// ---- plans ----

// Compile a plan. `names`: of its operators. Storages: serial (-1: made in the step), operator before its birth and its
// number there, bytes, tier, whether it leaves again, the slow memory that it begins in or -1. Uses: operators, by storage, from use_begin[i] to use_begin[i + 1].
// Actions: operator, kind, storage, tier, decision, codec. Decisions: operators, by decision, from remade_begin[i] to
// remade_begin[i + 1]. Returns its number.
int64_t lt_plan_add(
    int64_t op_count,
    const int64_t* names,
    int64_t storage_count,
    const int64_t* storages,
    const int64_t* use_begin,
    const int64_t* uses,
    int64_t action_count,
    const int64_t* actions,
    int64_t decision_count,
    const int64_t* remade_begin,
    const int64_t* remade) {
  auto plan = std::make_unique<Plan>();
  plan->names.assign(names, names + op_count);
  plan->actions.resize(op_count);
  plan->by_birth.resize(op_count + 1);
  for (int64_t i = 0; i < storage_count; ++i) {
    const int64_t* row = storages + kStorageColumns * i;
    if (row[0] >= 0)
      plan->by_serial.emplace(row[0], i);
    else
      plan->by_birth[row[1] + 1].emplace(row[2], i);
    plan->bytes.push_back(row[3]);
    plan->tier.push_back(static_cast<int32_t>(row[4]));
    plan->leaves_again.push_back(row[5] != 0);
    plan->birth_tier.push_back(static_cast<int32_t>(row[6]));
    plan->uses.emplace_back(uses + use_begin[i], uses + use_begin[i + 1]);
  }
  for (int64_t i = 0; i < action_count; ++i) {
    const int64_t* row = actions + 6 * i;
    plan->actions[row[0]].push_back(
        {static_cast<int32_t>(row[1]), static_cast<int32_t>(row[3]), row[2], row[4], static_cast<int32_t>(row[5])});
  }
  plan->remembered.resize(op_count);
  for (int64_t i = 0; i < decision_count; ++i) {
    Decision decision{{remade + remade_begin[i], remade + remade_begin[i + 1]}, kPrime};
    for (int64_t op : decision.ops) {
      plan->remembered[op] = true;
      decision.key = (decision.key ^ static_cast<uint64_t>(op)) * kPrime;
      decision.key = (decision.key ^ static_cast<uint64_t>(names[op])) * kPrime;
    }
    plan->decisions.push_back(std::move(decision));
  }
  // The same operators may make several storages.
  for (const auto& row : plan->actions)
    for (const Action& action : row)
      if (action.kind == Action::kDiscard) {
        uint64_t& key = plan->decisions[action.decision].key;
        key = (key ^ static_cast<uint64_t>(plan->bytes[action.storage])) * kPrime;
        key = (key ^ static_cast<uint64_t>(storages[kStorageColumns * action.storage + 1])) * kPrime;
        key = (key ^ static_cast<uint64_t>(storages[kStorageColumns * action.storage + 2])) * kPrime;
      }
  std::lock_guard<std::mutex> guard(pages().mutex);
  if (decision_count > 0) remakes().start();
  return schedule().add(std::move(plan));
}

void lt_step_begin(int64_t plan) {
  catch_faults();  // somebody may have come after us
  updates().forget_unseen();
  std::lock_guard<std::mutex> guard(pages().mutex);
  schedule().begin_step(plan);
}

// out: operators seen, where the step left the plan it began with (-1: nowhere), whether it had a plan's operators and
// other blocks. Returns the plan followed to its end, or -1.
int64_t lt_step_end(int64_t* out) {
  remakes().remake_all();
  std::lock_guard<std::mutex> guard(pages().mutex);
  out[0] = schedule().operators();
  out[1] = schedule().diverged_at();
  out[2] = schedule().resized();
  return schedule().end_step();
}

// The step's waits for storages of its plan: operator, storage, begin and end in ns, whether nobody had asked for it.
// Returns how many there are; `out` has room for `most` of them.
int64_t lt_step_waits(int64_t* out, int64_t most) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  const auto& waits = schedule().waits();
  for (int64_t i = 0; i < std::min<int64_t>(most, waits.size()); ++i) {
    const Wait& wait = waits[i];
    int64_t row[] = {wait.op, wait.storage, wait.begin_ns, wait.end_ns, wait.demanded};
    std::memcpy(out + 5 * i, row, sizeof(row));
  }
  return static_cast<int64_t>(waits.size());
}

void lt_step_abandon() {
  remakes().remake_all();
  std::lock_guard<std::mutex> guard(pages().mutex);
  schedule().abandon_step();
}
}
