// Running the calls of recipes again: see remakes.h.
#include "calls.h"
#include "remakes.h"

namespace lowtide {
namespace {

// What an earlier call of the same run made, as it is after the call with that stamp.
struct Fresh {
  c10::Storage storage;
  int64_t version;
};

}  // namespace

int Remakes::run(const std::vector<std::shared_ptr<Recipe>>& recipes) try {
  std::map<int64_t, std::shared_ptr<Call>> ordered;  // by stamp: as they ran
  std::unordered_map<int64_t, int64_t> last_use;     // by serial
  std::unordered_map<int64_t, const Recipe*> wanted;
  for (const auto& recipe : recipes) {
    wanted[recipe->serial] = recipe.get();
    for (const auto& call : recipe->calls) ordered[call->stamp] = call;
  }
  for (const auto& [stamp, call] : ordered)
    call->each_operand([&, at = stamp](const Operand& operand) { last_use[operand.serial] = at; });
  std::unordered_map<int64_t, Fresh> fresh;
  for (const auto& [stamp, call] : ordered) {
    auto storage_of = [&](const Operand& operand) {
      auto made = fresh.find(operand.serial);
      if (made != fresh.end() && made->second.version == operand.version) return made->second.storage;
      std::lock_guard<std::mutex> guard(pages().mutex);
      const Range* range = ranges().of_serial(operand.serial);
      bool as_it_was = range && range->written_at == operand.version && !operand.written &&
          !(range->recipe && !range->recipe->trial);
      TORCH_CHECK(as_it_was, "lowtide: what a discarded tensor is computed from has changed");
      return c10::Storage(
          c10::Storage::use_byte_size_t(),
          operand.nbytes,
          c10::DataPtr(range->data, c10::Device(c10::DeviceType::CPU)),
          nullptr,
          false);
    };
    std::vector<at::Tensor> made = run_again(*call, storage_of);
    call->each_operand([&, at = stamp](const Operand& operand) {
      auto found = fresh.find(operand.serial);
      if (operand.written && found != fresh.end()) found->second.version = at;
    });
    for (const Product& product : call->products) {
      TORCH_CHECK(product.position < made.size() && made[product.position].defined(), "lowtide: a call made less");
      bool used = wanted.count(product.serial) || last_use.count(product.serial);
      if (used) fresh[product.serial] = {made[product.position].storage(), stamp};
    }
    made.clear();
    for (auto each = fresh.begin(); each != fresh.end();) {
      auto last = last_use.find(each->first);
      auto want = wanted.find(each->first);
      bool later = last != last_use.end() && last->second > stamp;
      if (!later && want != wanted.end() && want->second->version == each->second.version) {
        // As soon as it is whole: whoever reads it next finds it in its own place.
        const c10::Storage& whole = each->second.storage;
        if (int error = put(*want->second, whole.data(), static_cast<int64_t>(whole.nbytes()), whole.use_count() == 1))
          return error;
        each = fresh.erase(each);
      } else if (!later && want == wanted.end()) {
        each = fresh.erase(each);
      } else {
        ++each;
      }
    }
  }
  TORCH_CHECK(fresh.empty(), "lowtide: calls that ran again did not make what they made before");
  std::lock_guard<std::mutex> guard(pages().mutex);
  counted.calls += static_cast<int64_t>(ordered.size());
  return 0;
} catch (const c10::OutOfMemoryError&) {
  return ENOMEM;
} catch (const std::exception&) {
  return kNotRemade;
}

}  // namespace lowtide
