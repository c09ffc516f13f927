// A range: the addresses of one large block of tensor memory, which stay while its pages come and go.
#pragma once
#include "coder.h"
#include "lowtide.h"

#include <list>
#include <memory>

namespace lowtide {

struct Transfer;
struct Recipe;
struct Update;

// Where a range's bytes are, and who pays for them. `dirty` and `slot` say whether its tier holds them too.
enum class Place : uint8_t {
  kHere = 0,      // its pages are at its addresses
  kLeaving = 1,   // its pages are elsewhere, being written; fast memory still pays
  kAway = 2,      // its tier only
  kArriving = 3,  // its pages are elsewhere, being read; fast memory pays already
  kSlow = 4,      // slow memory's pages are at its addresses; its slot, which changes with it, pays
};

// Where a tier keeps a range's bytes (offset -1: nowhere).
struct Slot {
  int32_t tier = 0;
  int64_t offset = -1;             // of encoded bytes 0: their frames have their own
  std::shared_ptr<Frames> frames;  // see Note [Encoded]
};

struct Range {
  char* start = nullptr;
  int64_t bytes = 0;   // whole pages
  int64_t block = 0;   // of the block that they belong to: more, for foreign memory
  int64_t serial = 0;  // 0: not a range any more
  Place place = Place::kHere;
  bool dirty = true;        // changed since its slot was written, or never written
  bool writable = true;     // mapped for writing; a range that came back is not until somebody writes (tracked)
  bool tracked = true;      // worth knowing whether it changes: no plan says that it will not leave again
  bool unused = false;      // since it came back
  bool huge = true;         // its pages are huge wherever a whole one fits; see Note [Huge pages]
  bool foreign = false;     // another allocator's memory, taken over: its addresses are not ours to give up
  bool leave_asked = false; // the plan wants it away, to `leave_tier`, as soon as nobody uses it
  bool leave_placed = false;  // and touched there in place
  bool stuck = false;       // a write of it failed, or its pages cannot be moved: it stays (R4)
  bool crowded_out = false; // its tier was full: it stays until a slot comes free
  bool summed = false;      // `checksum` is that of its slot
  int lost = 0;             // why its bytes could not be read back, or 0: see Note [Lost]
  bool given_up = false;    // it was lost, and said to be, when its tiers ended: nobody is told again
  bool filled = false;      // it has pages, and nothing of its own in them
  bool floats = false;      // operators have used it as single precision,
  bool mixed = false;       // and as something else: no codec rounds it
  int64_t used_bytes = 0;   // of its tensor: what follows in the last page is nobody's
  int32_t leave_tier = 0;
  int32_t leave_coder = 0;
  int pins = 0;             // operators that use it now, and those it was lent to
  int64_t last_touch = 0;   // by the clock of touches
  int64_t touched_ns = 0;   // when that was, where victims are discarded
  int64_t cached_at = -1;   // by the clock of touched bytes: see Note [Charging]
  int64_t noted_by = -1;    // the stamp of the operator that counts it among its operands
  int64_t storage = -1;     // its number in the plan that is followed
  Slot slot;
  int64_t copy = 0;        // the number of the write that filled its slot: no other has it
  int64_t slot_forks = 0;  // how many forks there had been when its slot was written
  uint64_t checksum = 0;
  int64_t written_at = 0;  // by the clock of writes: who has seen this number has seen these bytes
  int lent = 0;            // to borrowers who may write unseen; they are among the pins
  int liens = 0;           // recipes that read it; see Note [What a recipe stands on]
  bool orphan = false;     // its owner has freed it, and waits for the liens
  void* keeper = nullptr;  // of foreign memory: what frees it, for an orphan's end
  void (*free_keeper)(void*) = nullptr;
  std::shared_ptr<Recipe> recipe;  // it is discarded, or on trial (remakes.h)
  std::shared_ptr<Update> update;  // put off; it reads or changes this range (updates.h)
  bool barred = false;     // and it changes it: nobody has access to its pages; see Note [Barred]
  bool vacant = false;     // and it makes it: it has no bytes yet; see Note [Vacant]
  int wanted = 0;          // by operators that are about to begin, or run again: it may leave, but is not discarded
  char* data = nullptr;           // the tensor's own address; below `start` for foreign memory
  Transfer* transfer = nullptr;   // under way
  std::list<Range*>::iterator by_age;  // its place among all ranges, least recently touched first
};

}  // namespace lowtide
