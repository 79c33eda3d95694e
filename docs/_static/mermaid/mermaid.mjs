// Loads Mermaid from the file beside this one, so drawings need no network. scripts/docs takes it from
// the npm package. mermaid.min.js is a classic script; the site imports a module, so this wraps it.
const script = document.createElement("script");
script.src = new URL("mermaid.min.js", import.meta.url).href;
await new Promise((loaded, failed) => {
  script.onload = loaded;
  script.onerror = failed;
  document.head.append(script);
});
export default globalThis.mermaid;
