// Looks at every page of the site in a headless browser: on a phone and a desktop, light and dark.
// node xtask/site/look.mjs SITE BROWSER [PICTURES [PAGES]]
// Prints what a reader would stumble over, and ends with 1 if there is any. PICTURES is a folder for screenshots, and
// PAGES a regular expression for the pages to look at.

import { spawn } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { faults } from "./faults.mjs";

// Sizes in CSS pixels.
const WINDOWS = { phone: [390, 844], desktop: [1280, 800] };
const SCHEMES = { light: "default", dark: "slate" };
// Reports are all of one kind: one look at each is enough.
const REPORTS = /^results\/20/;
const [site, browser, pictures, only] = process.argv.slice(2);

const profile = fs.mkdtempSync(path.join(os.tmpdir(), "look-"));
const options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", `--user-data-dir=${profile}`];
const started = spawn(browser, [...options, "about:blank"], { stdio: ["ignore", "ignore", "pipe"], detached: true });
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));
process.on("exit", () => {
  try {
    process.kill(-started.pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
  fs.rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
});

// The browser names its socket in a line of standard error.
const address = await new Promise((resolve, reject) => {
  let said = "";
  started.stderr.on("data", (data) => {
    said += data;
    const found = said.match(/ws:\/\/\S+/);
    if (found) resolve(found[0]);
  });
  started.on("exit", () => reject(new Error(`the browser does not start: ${said}`)));
});
const socket = new WebSocket(address);
await new Promise((resolve, reject) => Object.assign(socket, { onopen: resolve, onerror: reject }));
const waiting = new Map();
const heard = new Map();
socket.onmessage = ({ data }) => {
  const { id, method, result, error } = JSON.parse(data);
  if (id) waiting.get(id)(error ? Promise.reject(new Error(error.message)) : result);
  else heard.get(method)?.();
};

let calls = 0;
function call(method, params = {}, sessionId = undefined) {
  calls += 1;
  socket.send(JSON.stringify({ id: calls, method, params, sessionId }));
  return new Promise((resolve) => waiting.set(calls, resolve));
}

const { targetId } = await call("Target.createTarget", { url: "about:blank" });
const { sessionId } = await call("Target.attachToTarget", { targetId, flatten: true });
const tab = (method, params) => call(method, params, sessionId);
await tab("Page.enable");
await tab("Network.enable");
// Each page would read the index of the search.
await tab("Network.setBlockedURLs", { urls: ["*/search/*"] });

async function open(page) {
  const loaded = new Promise((resolve) => heard.set("Page.loadEventFired", resolve));
  await tab("Page.navigate", { url: pathToFileURL(path.join(site, page)).href });
  await loaded;
}

async function evaluate(script) {
  const { result, exceptionDetails } = await tab("Runtime.evaluate", { expression: script, awaitPromise: true, returnByValue: true });
  if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
  return result.value;
}

const resize = ([width, height]) =>
  tab("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: width < 600 });
const prefer = (scheme) =>
  tab("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });

async function picture(page, name) {
  if (!pictures) return;
  const { data } = await tab("Page.captureScreenshot", { format: "png" });
  const file = path.join(pictures, `${page.replaceAll("/", "-")}-${name}.png`);
  fs.mkdirSync(pictures, { recursive: true });
  fs.writeFileSync(file, Buffer.from(data, "base64"));
}

const found = [];
const pages = fs.readdirSync(site, { recursive: true })
  .filter((file) => file.endsWith(".html") && (!only || new RegExp(only).test(file))).sort();
for (const page of pages) {
  await prefer("light");
  await open(page);
  // Colours would change slowly.
  await evaluate(`document.head.append(Object.assign(document.createElement("style"), { textContent: "* { transition: none !important }" }))`);
  for (const [window, size] of Object.entries(WINDOWS)) {
    await resize(size);
    if (REPORTS.test(page) && window !== "phone") continue;
    for (const [scheme, name] of Object.entries(SCHEMES)) {
      if (REPORTS.test(page) && scheme !== "light") continue;
      // The theme follows what the reader prefers when it loads a page. This is the same without loading it again.
      const set = `document.body.setAttribute("data-md-color-scheme", "${name}")`;
      for (const fault of await evaluate(`${set}; (${faults})()`)) {
        found.push(`${page}, ${window}, ${scheme}: ${fault}`);
      }
      await picture(page, `${window}-${scheme}`);
    }
  }
}

// The front page, as a reader who prefers dark opens it on a desktop.
// The theme keeps what a reader has seen.
await evaluate("localStorage.clear()");
await prefer("dark");
await open("index.html");
const dark = `new Promise((resolve) => {
  const look = () => document.body.getAttribute("data-md-color-scheme") === "slate";
  const turns = setInterval(() => look() && (clearInterval(turns), resolve(true)), 20);
  setTimeout(() => resolve(false), 5000);
})`;
if (!(await evaluate(dark))) found.push("index.html: light, where dark is preferred");
await resize(WINDOWS.desktop);
const above = `[...document.querySelectorAll("article h1, article img, article h1 ~ p, article .highlight")]
  .filter((part) => part.getBoundingClientRect().bottom <= innerHeight).map((part) => part.outerHTML + part.textContent).join("")`;
const fold = await evaluate(above);
for (const [what, words] of Object.entries({
  "one sentence": /<p>[^<]*host/,
  "the picture": /<img/,
  "how to install it": /pip install/,
  "three tasks": /(<a href="(howto|processes)[^>]*>[^]*){3}/,
})) {
  if (!words.test(fold)) found.push(`index.html: ${what} cannot be seen without scrolling`);
}

const lines = [...new Set(found)];
lines.slice(0, 100).forEach((line) => console.error(line));
console.log(`looked at ${pages.length} pages in a browser: ${lines.length} faults`);
process.exit(lines.length ? 1 : 0);
