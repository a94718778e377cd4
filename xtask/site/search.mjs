// Asks the site's own search, in the theme's worker, and compares the first results with xtask/site/queries.txt.
// node xtask/site/search.mjs SITE

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

// A query finds its page among this many.
const FIRST = 3;

const site = process.argv[2];
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

let listener;
let answer;
const self = {
  addEventListener: (_, heard) => (listener = heard),
  postMessage: (message) => answer(message),
  location: { href: "" },
  console,
};
self.self = self;
self.window = self;
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), self);
const ask = (message) => new Promise((resolve) => ((answer = resolve), listener({ data: message })));

await ask({ type: 0, data: { config, docs, options: { suggest: false } } });
const lines = fs.readFileSync(new URL("queries.txt", import.meta.url), "utf8").split("\n");
let missed = 0;
for (const line of lines.filter((line) => line && !line.startsWith("#"))) {
  const [query, page] = line.split(" → ");
  const found = (await ask({ type: 2, data: query })).data.items.map((item) => item[0].location.split("#")[0]);
  const pages = [...new Set(found)].slice(0, FIRST);
  if (!pages.includes(page)) {
    missed += 1;
    console.error(`"${query}" does not find ${page}, but ${pages.join(", ") || "nothing"}`);
  }
}
process.exit(missed ? 1 : 0);
