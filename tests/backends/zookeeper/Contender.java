import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Curator's mutex, told by lines what to do: "acquire", "try", "release". Answers each with one line. */
public class Contender {
    public static void main(String[] words) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(words[0], 10000, 5000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        InterProcessMutex mutex = new InterProcessMutex(client, words[1]);
        System.out.println("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            switch (line) {
                case "acquire" -> {
                    mutex.acquire();
                    System.out.println("held");
                }
                case "try" -> System.out.println(mutex.acquire(200, TimeUnit.MILLISECONDS) ? "held" : "taken");
                default -> {
                    mutex.release();
                    System.out.println("released");
                }
            }
        }
        client.close();
    }
}
