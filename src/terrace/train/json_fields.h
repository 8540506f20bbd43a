// JsonFields: fields of a JSON object read with their types checked; the first that is missing or
// of another type is remembered. Threads: a value on one thread.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "terrace/base/status.h"

namespace terrace {

class JsonFields {
 public:
  // Borrows `object` for its life.
  explicit JsonFields(const nlohmann::json& object) : object_(object) {
    if (!object.is_object()) Fail("", "an object");
  }

  // The field, or nullptr and a remembered error.
  const nlohmann::json* Find(const char* name) {
    if (!status_.ok()) return nullptr;
    const auto found = object_.find(name);
    if (found == object_.end()) {
      Fail(name, "there");
      return nullptr;
    }
    return &*found;
  }
  void Read(const char* name, std::uint64_t* value) {
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_number_unsigned()) return Fail(name, "a whole number");
    *value = field->get<std::uint64_t>();
  }
  void Read(const char* name, std::uint32_t* value) {
    std::uint64_t wide = 0;
    Read(name, &wide);
    if (wide > std::numeric_limits<std::uint32_t>::max()) return Fail(name, "below 2^32");
    *value = static_cast<std::uint32_t>(wide);
  }
  void Read(const char* name, bool* value) {
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_boolean()) return Fail(name, "true or false");
    *value = field->get<bool>();
  }
  // null is NaN.
  void Read(const char* name, double* value) {
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_number() && !field->is_null()) return Fail(name, "a number");
    *value = field->is_null() ? std::numeric_limits<double>::quiet_NaN() : field->get<double>();
  }
  void Read(const char* name, std::string* value) {
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return;
    if (!field->is_string()) return Fail(name, "text");
    *value = field->get<std::string>();
  }
  // An array; empty and a remembered error where it is none.
  const nlohmann::json& Array(const char* name) {
    static const nlohmann::json kEmpty = nlohmann::json::array();
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return kEmpty;
    if (field->is_array()) return *field;
    Fail(name, "a list");
    return kEmpty;
  }
  const nlohmann::json& Object(const char* name) {
    static const nlohmann::json kEmpty = nlohmann::json::object();
    const nlohmann::json* field = Find(name);
    if (field == nullptr) return kEmpty;
    if (field->is_object()) return *field;
    Fail(name, "an object");
    return kEmpty;
  }
  // kCorruption with the first field that was wrong.
  const Status& status() const { return status_; }
  void Fail(const char* name, const char* expected) {
    if (!status_.ok()) return;
    status_ = CorruptionError(std::string("field '") + name + "' is not " + expected);
  }

 private:
  const nlohmann::json& object_;
  Status status_;
};

}  // namespace terrace
