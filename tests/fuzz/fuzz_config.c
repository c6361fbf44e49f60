/* Any bytes as a config.json. The values of a configuration that is accepted must be inside the limits. */
#include "tests/fuzz/fuzz.h"
#include "train/model/config.h"

bool fuzz_accepts(const uint8_t *bytes, size_t size)
{
    model_config config;
    error err = {0};
    if (!model_config_parse(&config, bytes, size, "fuzz", &err)) {
        PROMISE(err.code == ERROR_RUNTIME && err.text[0] != '\0');
        return false;
    }
    PROMISE(model_config_check(&config, &err));
    PROMISE(model_config_same(&config, &config, &err));
    PROMISE(config.topk <= config.experts && config.hidden % (2 * config.heads) == 0);
    return true;
}
